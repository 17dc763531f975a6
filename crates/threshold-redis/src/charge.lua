-- Computes a charge as `Balance::look` and `Balance::charge` in core do, for `settle.lua` and `swap.lua`, which begin with this text.
--
-- `bytes` is the balance without a block, `nil` for none; `charges` has the figures of the charge at `at`, as
-- `Charge::to_script` in core packs them. Returns nothing if the script cannot tell, so that core has to decide. Otherwise:
--   where the next charge begins, whether the cost fits, the new bytes, when they fall silent (`false` if that is when they did
--   before), the part of the balance that is charged and its fraction, until when the charge counts, and for a balance that is
--   long a short one from which core computes the same figures if the cost fits.
--
-- Every number is below 2^53, where a double is exact; core passes no others, and a balance with others has shape 0.
--
-- Redis runs this text from its first line for every call, so it creates few functions, tables and strings: each costs about as
-- much as a comparison of balances.
local LARGEST = 9007199254740992
local call, read, write, format, byte, sub = redis.call, struct.unpack, struct.pack, string.format, string.byte, string.sub
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

local function charge(bytes, charges, at)
  local terms, shape = byte(charges, at, at + 1)
  -- The first byte has a bit for a limit that denies (1), one for a cost that is charged (2), and one for a charge that is made
  -- whether or not it fits (4), up to as much debt as the limit.
  local is_record, own_shape = terms >= 4, shape
  if bytes then
    local version
    version, own_shape = byte(bytes, 1, 2)
    -- A shape that this script does not know, in this version or a later one, is left to core.
    if version ~= 1 or (own_shape ~= shape and not (own_shape == 5 and shape == 1)) then
      return
    end
  end
  if shape == 1 then
    -- A token bucket: the time at which it is full again, in microseconds and a fraction. One that was given back to while later
    -- charges counted (5) also has how much, and the latest time at which it was to be full.
    local quota, period, parts, add, add_fraction, capacity, capacity_fraction
    quota, period, parts, add, add_fraction, capacity, capacity_fraction, at = read('>I8I8I8I8I8I8I8', charges, at + 2)
    local wait, fraction, given, given_fraction, peak, peak_fraction = 0, 0, 0, 0, nil, nil
    if bytes then
      local full, rest, own_quota, own_period = read('>I8I8I8I8', bytes, 3)
      if own_quota ~= quota or own_period ~= period then
        return
      end
      if own_shape == 5 then
        given, given_fraction, peak, peak_fraction = read('>I8I8I8I8', bytes, 35)
        if peak + (peak_fraction > 0 and 1 or 0) <= now then
          given, given_fraction, peak = 0, 0, nil
        elseif peak - now > 2 * capacity then
          return
        end
      end
      if full >= now then
        wait, fraction = full - now, rest
      end
    end
    local most, most_fraction = capacity, capacity_fraction
    if is_record then
      most, most_fraction = 2 * capacity, 2 * capacity_fraction
      if most_fraction >= parts then
        most, most_fraction = most + 1, most_fraction - parts
      end
    end
    if wait > most or (wait == most and fraction > most_fraction) then
      return
    end
    wait, fraction = wait + add, fraction + add_fraction
    if fraction >= parts then
      wait, fraction = wait + 1, fraction - parts
    end
    local full = now + wait
    -- A debt that saturates is left to core.
    if full + given >= LARGEST - 1 or (is_record and (wait > most or (wait == most and fraction > most_fraction))) then
      return
    end
    local fits = wait < capacity or (wait == capacity and fraction <= capacity_fraction)
    local silent = full + (fraction > 0 and 1 or 0)
    if not peak then
      return at, fits, write('>BBI8I8I8I8', 1, 1, full, fraction, quota, period), silent, full, fraction, silent
    end
    if full > peak or (full == peak and fraction > peak_fraction) then
      peak, peak_fraction = full, fraction
    end
    local part, part_fraction = full + given, fraction + given_fraction
    if part_fraction >= parts then
      part, part_fraction = part + 1, part_fraction - parts
    end
    local new = write('>BBI8I8I8I8I8I8I8I8', 1, 5, full, fraction, quota, period, given, given_fraction, peak, peak_fraction)
    return at, fits, new, peak + (peak_fraction > 0 and 1 or 0), part, part_fraction, silent
  elseif shape == 2 then
    -- A fixed window: its beginning and its count.
    local quota, period, from_first, cost
    quota, period, from_first, cost, at = read('>I8I8I8I8', charges, at + 2)
    local start, used = now, 0
    if from_first ~= 1 then
      start = now - now % period
    end
    local silent = start + period
    if bytes then
      local own_start, own_used, own_period = read('>I8I8I8', bytes, 3)
      if own_period ~= period or own_start > start then
        return
      end
      if now < own_start + period and not (from_first == 1 and own_used == 0) then
        start, used, silent = own_start, own_used, false
      end
    end
    local fits = used + cost <= quota
    if is_record and used + cost > 2 * quota then
      return
    end
    return at, fits, write('>BBI8I8I8', 1, 2, start, used + cost, period), silent, start, 0, start
  elseif shape == 3 then
    -- A sliding estimate: the beginning of the current window, its count and that of the window before.
    local quota, period, cost
    quota, period, cost, at = read('>I8I8I8', charges, at + 2)
    local start, current, previous = now - now % period, 0, 0
    local silent = start + 2 * period
    if bytes then
      local own_start, own_current, own_previous, own_period = read('>I8I8I8I8', bytes, 3)
      if own_period ~= period or own_start > start then
        return
      end
      if own_start == start then
        current, previous = own_current, own_previous
        -- Without a count of its own, as after a refund, the window was to fall silent one period earlier.
        silent = own_current == 0 and silent
      elseif now < own_start + 2 * period then
        previous = own_current
      end
    end
    local product = previous * (period - (now - start))
    if product >= LARGEST then
      return
    end
    -- Rounded up, without a division of numbers that a double cannot hold.
    local rest = product % period
    local weight = (product - rest) / period + (rest > 0 and 1 or 0)
    local used = current + weight + cost
    if is_record and used > 2 * quota then
      return
    end
    return at, used <= quota, write('>BBI8I8I8I8', 1, 3, start, current + cost, previous, period), silent, start, 0, start
  elseif shape == 4 then
    -- A sliding log or window: entries of a time and a cost, oldest first, after the period and the sum of the costs.
    local quota, period, grain, cost, most
    quota, period, grain, cost, most, at = read('>I8I8I8I8I8', charges, at + 2)
    local kept_at = grain > 0 and now - now % grain + grain or now
    local first, sum, oldest, entries, short = 19, 0, nil, '', nil
    if bytes then
      local own_period, own_sum = read('>I8I8', bytes, 3)
      if own_period ~= period then
        return
      end
      sum = own_sum
      while first <= #bytes do
        local entry, amount = read('>I8I8', bytes, first)
        if entry + period > now then
          oldest = entry
          break
        end
        first, sum = first + 16, sum - amount
      end
      entries = sub(bytes, first)
      short = oldest and write('>BBI8I8I8I8', 1, 4, period, sum, oldest, sum) or ''
    end
    if is_record and sum + cost > 2 * quota then
      return
    end
    local last, amount
    if #entries > 0 then
      last, amount = read('>I8I8', entries, #entries - 15)
      if last > kept_at then
        return
      end
    end
    if last == kept_at then
      entries = sub(entries, 1, #entries - 16) .. write('>I8I8', kept_at, amount + cost)
    elseif #entries >= 16 * most then
      return
    else
      entries = entries .. write('>I8I8', kept_at, cost)
    end
    local new = write('>BBI8I8', 1, 4, period, sum + cost) .. entries
    return at, sum + cost <= quota, new, kept_at + period, kept_at, 0, kept_at, short
  elseif shape == 6 then
    -- Concurrency: its ttl and the mean of recent times, in milliseconds; holds of an id (24 bytes), a cost and an expiry, the first to
    -- expire first.
    local quota, ttl, cost, ttl_millis, after = read('>I8I8I8I8', charges, at + 2)
    local id = sub(charges, after, after + 23)
    local used, mean, first, last = 0, 0, nil, now
    if bytes then
      mean = read('>I8', bytes, 11)
      for place = 19, #bytes, 40 do
        local amount, expires = read('>I8I8', bytes, place + 24)
        if expires > now then
          first, used, last = first or place, used + amount, expires
        end
      end
    end
    local expires = now + ttl
    if last > expires or (is_record and used + cost > 2 * quota) then
      return
    end
    local holds = first and sub(bytes, first) or ''
    local head = write('>BBI8I8', 1, 6, ttl_millis, first and mean or 0)
    local short = bytes and (used > 0 and head .. id .. write('>I8I8', used, expires) or '')
    return after + 24, used + cost <= quota, head .. holds .. id .. write('>I8I8', cost, expires), expires, expires, 0, expires, short
  end
end
