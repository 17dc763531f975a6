#!lua
-- Charges a request to all of its limits, or to none, and returns what was there.
--
-- KEYS: the balances of the charges, then the standings of the subjects.
-- ARGV: the figures of all charges one after another, as `Bill::to_script` in core packs them; '1' for a sample, otherwise '';
--   for each standing the bytes that it must have ('' for none).
-- Returns one string: a verdict (1 byte), the time in microseconds (8 bytes), and for each record its length (4 bytes, 0 for
-- none) and what was found:
--   1  charged, and for each charge its balance before that; of a log with room only the sum and the oldest entry. For a
--      sample each balance whole, and then what was written in its place
--   0  nothing charged: an enforced limit is full. The bytes of every record
--   2  nothing charged: the script cannot tell. The bytes of every record
--
-- Every number is below 2^53, where a double is exact; core passes no others, and a balance with others has shape 0.
--
-- Redis runs this text from its first line for every call, so it creates few functions, tables and strings: each costs about as
-- much as a comparison of balances. One string as the reply is cheaper than a list, whose length Redis has to write afterwards.

local LARGEST = 9007199254740992
local call, read, write, format = redis.call, struct.unpack, struct.pack, string.format

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local found = call('MGET', unpack(KEYS))

-- MGET answers nil for a key of another type, which must not be taken for a record that is not there.
local missing
for i = 1, #KEYS do
  if not found[i] then
    missing = missing or {}
    missing[#missing + 1] = KEYS[i]
  end
end
if missing and call('EXISTS', unpack(missing)) > 0 then
  return redis.error_reply('WRONGTYPE a record of the store has another type')
end

local function answer(verdict, values, count)
  local parts = { write('>BI8', verdict, now) }
  for i = 1, count do
    local bytes = values[i]
    parts[i + 1] = bytes and write('>I4c0', #bytes, bytes) or '\0\0\0\0'
  end
  return table.concat(parts)
end

local charges, at, count = ARGV[1], 1, 0
-- What is written for each charge: its new bytes, and when they fall silent; `false` if that is when they did before.
local news, silents, denied = {}, {}, false
-- What core has to know of a log with room.
local digests
while at <= #charges do
  count = count + 1
  local bytes = found[count]
  local terms, shape = string.byte(charges, at, at + 1)
  -- A shape that this script does not know, in this version or a later one, is left to core.
  if bytes then
    local version, own_shape = string.byte(bytes, 1, 2)
    if version ~= 1 or own_shape ~= shape then
      return answer(2, found, #KEYS)
    end
  end
  local fits, new, silent
  if shape == 1 then
    -- A token bucket: the time at which it is full again, in microseconds and a fraction.
    local quota, period, parts, add, add_fraction, capacity, capacity_fraction
    quota, period, parts, add, add_fraction, capacity, capacity_fraction, at = read('>I8I8I8I8I8I8I8', charges, at + 2)
    local wait, fraction = 0, 0
    if bytes then
      local full, rest, own_quota, own_period = read('>I8I8I8I8', bytes, 3)
      if own_quota ~= quota or own_period ~= period then
        return answer(2, found, #KEYS)
      end
      if full >= now then
        wait, fraction = full - now, rest
      end
    end
    if wait > capacity or (wait == capacity and fraction > capacity_fraction) then
      return answer(2, found, #KEYS)
    end
    wait, fraction = wait + add, fraction + add_fraction
    if fraction >= parts then
      wait, fraction = wait + 1, fraction - parts
    end
    fits = wait < capacity or (wait == capacity and fraction <= capacity_fraction)
    local full = now + wait
    if full >= LARGEST then
      return answer(2, found, #KEYS)
    end
    new = write('>BBI8I8I8I8', 1, 1, full, fraction, quota, period)
    silent = full + (fraction > 0 and 1 or 0)
  elseif shape == 2 then
    -- A fixed window: its beginning and its count.
    local quota, period, from_first, cost
    quota, period, from_first, cost, at = read('>I8I8I8I8', charges, at + 2)
    local start, used = now, 0
    if from_first ~= 1 then
      start = now - now % period
    end
    silent = start + period
    if bytes then
      local own_start, own_used, own_period = read('>I8I8I8', bytes, 3)
      if own_period ~= period or own_start > start then
        return answer(2, found, #KEYS)
      end
      if now < own_start + period and not (from_first == 1 and own_used == 0) then
        start, used, silent = own_start, own_used, false
      end
    end
    fits = used + cost <= quota
    new = write('>BBI8I8I8', 1, 2, start, used + cost, period)
  elseif shape == 3 then
    -- A sliding estimate: the beginning of the current window, its count and that of the window before.
    local quota, period, cost
    quota, period, cost, at = read('>I8I8I8', charges, at + 2)
    local start, current, previous = now - now % period, 0, 0
    silent = start + 2 * period
    if bytes then
      local own_start, own_current, own_previous, own_period = read('>I8I8I8I8', bytes, 3)
      if own_period ~= period or own_start > start then
        return answer(2, found, #KEYS)
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
      return answer(2, found, #KEYS)
    end
    -- Rounded up, without a division of numbers that a double cannot hold.
    local rest = product % period
    local weight = (product - rest) / period + (rest > 0 and 1 or 0)
    fits = current + weight + cost <= quota
    new = write('>BBI8I8I8I8', 1, 3, start, current + cost, previous, period)
  else
    -- A sliding log or window: entries of a time and a cost, oldest first, after the period and the sum of the costs.
    local quota, period, grain, cost, most
    quota, period, grain, cost, most, at = read('>I8I8I8I8I8', charges, at + 2)
    local kept_at = grain > 0 and now - now % grain + grain or now
    local first, sum, oldest, entries = 19, 0, nil, ''
    if bytes then
      local own_period, own_sum = read('>I8I8', bytes, 3)
      if own_period ~= period then
        return answer(2, found, #KEYS)
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
      entries = string.sub(bytes, first)
    end
    fits = sum + cost <= quota
    if fits and bytes then
      digests = digests or {}
      digests[count] = oldest and write('>BBI8I8I8I8', 1, 4, period, sum, oldest, sum) or ''
    end
    local last, amount
    if #entries > 0 then
      last, amount = read('>I8I8', entries, #entries - 15)
      if last > kept_at then
        return answer(2, found, #KEYS)
      end
    end
    if last == kept_at then
      entries = string.sub(entries, 1, #entries - 16) .. write('>I8I8', kept_at, amount + cost)
    elseif #entries >= 16 * most then
      return answer(2, found, #KEYS)
    else
      entries = entries .. write('>I8I8', kept_at, cost)
    end
    new, silent = write('>BBI8I8', 1, 4, period, sum + cost) .. entries, kept_at + period
  end
  -- The first byte of a charge has a bit for a limit that denies, and one for a cost that is charged.
  if fits then
    if terms >= 2 then
      news[count], silents[count] = new, silent
    end
  elseif terms % 2 == 1 then
    denied = true
  end
end

for i = count + 1, #KEYS do
  if (found[i] or '') ~= ARGV[i - count + 2] then
    return answer(2, found, #KEYS)
  end
end
if denied then
  return answer(0, found, #KEYS)
end
for i = 1, count do
  local new, silent = news[i], silents[i]
  if silent then
    call('SET', KEYS[i], new, 'PXAT', format('%d', (silent + 999) / 1000))
  elseif new then
    -- The window is the same, so its time to live is right. Setting it again takes a third of the time of this call.
    call('SET', KEYS[i], new, 'KEEPTTL')
  end
end
if ARGV[2] == '1' then
  for i = 1, count do
    found[count + i] = news[i] or false
  end
  return answer(1, found, 2 * count)
end
-- When the cost will fit depends on every entry of a log, so that one without room was left as it is.
for i, digest in pairs(digests or {}) do
  found[i] = digest
end
return answer(1, found, count)
