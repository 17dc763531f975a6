-- Changes of one balance for `swap.lua`, which begins with `charge.lua` and this text. They add and subtract, so that other nodes may
-- charge the same balance all the time.

-- Gives back what a charge took, as far as it still counts. The same as `Receipt::refund` in core. `history` is that of the
-- partition. Returns where the next change begins, and the new bytes ('' for none, nil where nothing changes) with the time at which
-- they fall silent (`false` if that is when they did before); nothing if the script cannot tell.
local function give_back(bytes, changes, at, history)
  local as_of = read('>I8', changes, at + 1)
  local then_ = as_of > 0 and math.min(as_of, now) or now
  local own_history, shape = sub(changes, at + 9, at + 16), byte(changes, at + 18)
  local is_lost = own_history ~= history or own_history == '\0\0\0\0\0\0\0\0'
  at = at + 19
  local own_shape = shape
  if bytes then
    local version
    version, own_shape = byte(bytes, 1, 2)
    if version ~= 1 or (own_shape ~= shape and not (own_shape == 5 and shape == 1)) then
      return
    end
  end
  if shape == 1 then
    local quota, period, parts, charged_at, counts_until, part, fraction, back, back_fraction
    quota, period, parts, charged_at, counts_until, part, fraction, back, back_fraction, at =
      read('>I8I8I8I8I8I8I8I8I8', changes, at)
    if not bytes or is_lost or then_ < charged_at or then_ >= counts_until then
      return at
    end
    local full, rest, own_quota, own_period = read('>I8I8I8I8', bytes, 3)
    if own_quota ~= quota or own_period ~= period then
      return at
    end
    local given, given_fraction, peak, peak_fraction = 0, 0, full, rest
    if own_shape == 5 then
      given, given_fraction, peak, peak_fraction = read('>I8I8I8I8', bytes, 35)
    end
    local gross, gross_fraction = full + given, rest + given_fraction
    if gross_fraction >= parts then
      gross, gross_fraction = gross + 1, gross_fraction - parts
    end
    if part > gross or (part == gross and fraction > gross_fraction) then
      -- This bucket was never charged that far: it was lost since, or the clock has stepped back.
      return at
    end
    local left, left_fraction = part - given - then_, fraction - given_fraction
    if left_fraction < 0 then
      left, left_fraction = left - 1, left_fraction + parts
    end
    if left < 0 then
      left, left_fraction = 0, 0
    end
    if back > left or (back == left and back_fraction > left_fraction) then
      back, back_fraction = left, left_fraction
    end
    full, rest = full - back, rest - back_fraction
    if rest < 0 then
      full, rest = full - 1, rest + parts
    end
    -- The latest charge is undone by the level alone. Any other refund has to be remembered.
    if part < gross or fraction < gross_fraction then
      given, given_fraction = given + back, given_fraction + back_fraction
      if given_fraction >= parts then
        given, given_fraction = given + 1, given_fraction - parts
      end
    end
    if own_shape == 1 and given == 0 and given_fraction == 0 then
      return at, write('>BBI8I8I8I8', 1, 1, full, rest, quota, period), full + (rest > 0 and 1 or 0)
    end
    local new = write('>BBI8I8I8I8I8I8I8I8', 1, 5, full, rest, quota, period, given, given_fraction, peak, peak_fraction)
    return at, new, peak + (peak_fraction > 0 and 1 or 0)
  elseif shape == 6 then
    local amount = read('>I8', changes, at)
    local id = sub(changes, at + 8, at + 31)
    at = at + 32
    if not bytes or is_lost then
      return at
    end
    local ttl, mean = read('>I8I8', bytes, 3)
    local kept, began, in_flight, silent = {}, nil, false, 0
    for place = 19, #bytes, 40 do
      local own, cost, expires = sub(bytes, place, place + 23), read('>I8I8', bytes, place + 24)
      if own == id then
        local back = math.min(cost, amount)
        cost, amount = cost - back, amount - back
        if cost == 0 and expires > then_ then
          began = math.max(expires - ttl * 1000, 0)
        end
      end
      if cost > 0 then
        kept[#kept + 1] = own .. write('>I8I8', cost, expires)
        in_flight, silent = in_flight or expires > then_, expires
      end
    end
    if began then
      local duration = math.max(math.min(math.ceil(math.max(then_ - began, 0) / 1000), 4294967295), 1)
      mean = mean == 0 and duration or mean - math.ceil(mean / 8) + math.ceil(duration / 8)
    end
    return at, write('>BBI8I8', 1, 6, ttl, in_flight and mean or 0) .. table.concat(kept), silent
  end
  local period, charged_at, part, amount
  period, charged_at, part, amount, at = read('>I8I8I8I8', changes, at)
  if not bytes or is_lost or then_ < charged_at then
    return at
  end
  if shape == 2 then
    local start, used, own_period = read('>I8I8I8', bytes, 3)
    if own_period == period and start == part then
      used = math.max(used - amount, 0)
      return at, write('>BBI8I8I8', 1, 2, start, used, period), used == 0 and start
    end
  elseif shape == 3 then
    local start, current, previous, own_period = read('>I8I8I8I8', bytes, 3)
    if own_period == period and (start == part or start == part + period) then
      if start == part then
        current = math.max(current - amount, 0)
      else
        previous = math.max(previous - amount, 0)
      end
      local silent = current > 0 and start + 2 * period or (previous > 0 and start + period or start)
      return at, write('>BBI8I8I8I8', 1, 3, start, current, previous, period), silent
    end
  elseif shape == 4 then
    local own_period, sum = read('>I8I8', bytes, 3)
    -- From the end, because most charges are given back soon.
    local place = own_period == period and #bytes - 15 or 0
    while place >= 19 do
      local entry, cost = read('>I8I8', bytes, place)
      if entry <= part then
        if entry == part then
          local left = math.max(cost - amount, 0)
          local entries = sub(bytes, 19, place - 1) .. (left > 0 and write('>I8I8', entry, left) or '') .. sub(bytes, place + 16)
          local silent = #entries > 0 and read('>I8', entries, #entries - 15) + period or 0
          return at, write('>BBI8I8', 1, 4, period, sum - (cost - left)) .. entries, silent
        end
        break
      end
      place = place - 16
    end
  else
    return
  end
  return at
end

-- Gives back at most `cost` of what was charged last, and at most what still counts. The same as `Balance::credit` in core. Returns as
-- `give_back` does.
local function credit(bytes, changes, at)
  local shape = byte(changes, at + 2)
  local own_shape, version = shape, 1
  if bytes then
    version, own_shape = byte(bytes, 1, 2)
    if version ~= 1 or (own_shape ~= shape and not (own_shape == 5 and shape == 1)) then
      return
    end
  end
  at = at + 3
  if shape == 1 then
    local quota, period, parts, back, back_fraction
    quota, period, parts, back, back_fraction = read('>I8I8I8I8I8', changes, at)
    at = at + 56
    if not bytes then
      return at
    end
    local full, rest, own_quota, own_period = read('>I8I8I8I8', bytes, 3)
    if own_quota ~= quota or own_period ~= period or own_shape == 5 then
      return
    end
    if full < now then
      return at
    end
    if back > full - now or (back == full - now and back_fraction > rest) then
      back, back_fraction = full - now, rest
    end
    full, rest = full - back, rest - back_fraction
    if rest < 0 then
      full, rest = full - 1, rest + parts
    end
    return at, write('>BBI8I8I8I8', 1, 1, full, rest, quota, period), full + (rest > 0 and 1 or 0)
  elseif shape == 2 then
    local _, period, _, cost = read('>I8I8I8I8', changes, at)
    at = at + 32
    if not bytes then
      return at
    end
    local start, used, own_period = read('>I8I8I8', bytes, 3)
    if own_period ~= period or start > now then
      return
    end
    used = math.max(used - cost, 0)
    return at, write('>BBI8I8I8', 1, 2, start, used, period), used == 0 and start
  elseif shape == 3 then
    local _, period, cost = read('>I8I8I8', changes, at)
    at = at + 24
    if not bytes then
      return at
    end
    local start, current, previous, own_period = read('>I8I8I8I8', bytes, 3)
    if own_period ~= period or start > now then
      return
    end
    local back = math.min(current, cost)
    current, previous = current - back, math.max(previous - (cost - back), 0)
    local silent = current > 0 and start + 2 * period or (previous > 0 and start + period or start)
    return at, write('>BBI8I8I8I8', 1, 3, start, current, previous, period), silent
  elseif shape == 4 then
    local _, period, grain, cost = read('>I8I8I8I8', changes, at)
    at = at + 40
    if not bytes then
      return at
    end
    local own_period, sum = read('>I8I8', bytes, 3)
    local place = #bytes - 15
    local kept_at = grain > 0 and now - now % grain + grain or now
    if own_period ~= period or (place >= 19 and read('>I8', bytes, place) > kept_at) then
      return
    end
    local left
    while place >= 19 and cost > 0 do
      local entry, own_cost = read('>I8I8', bytes, place)
      local back = math.min(own_cost, cost)
      sum, cost, place = sum - back, cost - back, place - 16
      left = own_cost > back and write('>I8I8', entry, own_cost - back) or nil
    end
    local entries = sub(bytes, 19, place + 15) .. (left or '')
    local silent = #entries > 0 and read('>I8', entries, #entries - 15) + period or 0
    return at, write('>BBI8I8', 1, 4, period, sum) .. entries, silent
  end
end

-- Makes all changes of one balance. Returns the new bytes ('' for none, nil where nothing changes), and when they fall silent
-- (`false` if that is when they did before), or `false` and whether that is because a charge does not fit; otherwise the script cannot
-- tell.
local function adjust(key, bytes, changes, history)
  local before, prefix, silent, blocked = bytes, '', false, 0
  if bytes and byte(bytes) == 1 and byte(bytes, 2) == 7 then
    prefix, blocked = sub(bytes, 1, 10), read('>I8', bytes, 3)
    bytes = #bytes > 10 and sub(bytes, 11) or nil
  end
  local at = 1
  while at <= #changes do
    local kind, after, new, own_silent, fits = byte(changes, at), nil, nil, nil, nil
    if kind == 1 then
      after, new, own_silent = give_back(bytes, changes, at, history)
    elseif kind == 2 then
      local is_record = byte(changes, at + 1) >= 4
      after, fits, new, own_silent = charge(bytes, changes, at + 1)
      if after and not fits and not is_record then
        return false, true
      end
      if after and not is_record and blocked > now then
        return false, true
      end
    elseif kind == 3 then
      after, new, own_silent = credit(bytes, changes, at)
    else
      local until_ = read('>I8', changes, at + 1)
      after = at + 9
      if until_ > blocked then
        prefix, blocked = write('>BBI8', 1, 7, until_), until_
        -- As long as what is there counts, if that is longer.
        local theirs = call('PEXPIRETIME', key)
        silent = silent or (theirs >= 0 and theirs * 1000 or 0)
      end
    end
    if not after then
      return false, false
    end
    at = after
    if new then
      -- A balance that says nothing is dropped.
      if own_silent and own_silent <= now then
        bytes, silent = nil, 0
      else
        bytes, silent = new, own_silent or silent
      end
    end
  end
  local result = prefix .. (bytes or '')
  if result == (before or '') then
    return nil
  end
  if silent then
    silent = math.max(silent, blocked)
  end
  if silent and silent <= now then
    return '', silent
  end
  return result, silent
end
