#!lua
-- Charges a request to all of its limits, or to none, and returns what was there.
--
-- KEYS: the balances of the charges, then the standings of the subjects.
-- ARGV: for each charge its figures, as `ScriptCharge` in core packs them.
-- Returns a verdict, the time as seconds and microseconds, and what was found:
--   1  charged, and for each charge its balance before that; of a log with room only the sum and the oldest entry
--   0  nothing charged: an enforced limit is full. The bytes of every record
--   2  nothing charged: the script cannot tell. The bytes of every record
--
-- Every number is below 2^53, where a double is exact; core passes no others, and a balance with others has shape 0.

local UNUSUAL = {}
local LARGEST = 9007199254740992

-- Each shape takes the bytes of a balance (false for none), its charge and the time. Returns whether the cost fits, the new
-- bytes, when they fall silent, and what core has to know of the old ones.
local shapes = {}

-- A token bucket: the time at which it is full again, in microseconds and a fraction.
shapes[1] = function(bytes, charge, now)
  local _, _, quota, period, parts, add, add_fraction, capacity, capacity_fraction = struct.unpack('>BBI8I8I8I8I8I8I8', charge)
  local full, fraction = now, 0
  if bytes then
    local _, _, full_at, rest, own_quota, own_period = struct.unpack('>BBI8I8I8I8', bytes)
    if own_quota ~= quota or own_period ~= period then
      return UNUSUAL
    end
    if full_at >= now then
      full, fraction = full_at, rest
    end
  end
  local wait = full - now
  if wait > capacity or (wait == capacity and fraction > capacity_fraction) then
    return UNUSUAL
  end
  wait, fraction = wait + add, fraction + add_fraction
  if fraction >= parts then
    wait, fraction = wait + 1, fraction - parts
  end
  local fits = wait < capacity or (wait == capacity and fraction <= capacity_fraction)
  local ends = now + wait
  if ends >= LARGEST then
    return UNUSUAL
  end
  return fits, struct.pack('>BBI8I8I8I8', 1, 1, ends, fraction, quota, period), ends + (fraction > 0 and 1 or 0), bytes
end

-- A fixed window: its beginning and its count.
shapes[2] = function(bytes, charge, now)
  local _, _, quota, period, from_first, cost = struct.unpack('>BBI8I8I8I8', charge)
  local current = from_first == 1 and now or now - now % period
  local start, used = current, 0
  if bytes then
    local _, _, own_start, own_used, own_period = struct.unpack('>BBI8I8I8', bytes)
    if own_period ~= period or own_start > current then
      return UNUSUAL
    end
    if now < own_start + period and not (from_first == 1 and own_used == 0) then
      start, used = own_start, own_used
    end
  end
  local ends = start + period
  return used + cost <= quota, struct.pack('>BBI8I8I8', 1, 2, start, used + cost, period), ends, bytes
end

-- A sliding estimate: the beginning of the current window, its count and that of the window before.
shapes[3] = function(bytes, charge, now)
  local _, _, quota, period, cost = struct.unpack('>BBI8I8I8', charge)
  local start, current, previous = now - now % period, 0, 0
  if bytes then
    local _, _, own_start, own_current, own_previous, own_period = struct.unpack('>BBI8I8I8I8', bytes)
    if own_period ~= period or own_start > start then
      return UNUSUAL
    end
    if own_start == start then
      current, previous = own_current, own_previous
    elseif now < own_start + 2 * period then
      previous = own_current
    end
  end
  local product = previous * (period - (now - start))
  if product >= LARGEST then
    return UNUSUAL
  end
  -- Rounded up, without a division of numbers that a double cannot hold.
  local weight = (product - product % period) / period + (product % period > 0 and 1 or 0)
  local fits = current + weight + cost <= quota
  return fits, struct.pack('>BBI8I8I8I8', 1, 3, start, current + cost, previous, period), start + 2 * period, bytes
end

-- A sliding log or window: entries of a time and a cost, oldest first, after the period and the sum of the costs.
shapes[4] = function(bytes, charge, now)
  local _, _, quota, period, grain, cost, most = struct.unpack('>BBI8I8I8I8I8', charge)
  local kept_at = grain > 0 and now - now % grain + grain or now
  local first, sum, oldest, entries = 19, 0, nil, ''
  if bytes then
    local _, _, own_period, own_sum = struct.unpack('>BBI8I8', bytes)
    if own_period ~= period then
      return UNUSUAL
    end
    sum = own_sum
    while first <= #bytes do
      local time, amount = struct.unpack('>I8I8', bytes, first)
      if time + period > now then
        oldest = time
        break
      end
      first, sum = first + 16, sum - amount
    end
    entries = string.sub(bytes, first)
  end
  local fits = sum + cost <= quota
  local before = oldest and struct.pack('>BBI8I8I8I8', 1, 4, period, sum, oldest, sum)
  local last, amount
  if #entries > 0 then
    last, amount = struct.unpack('>I8I8', entries, #entries - 15)
    if last > kept_at then
      return UNUSUAL
    end
  end
  if last == kept_at then
    entries = string.sub(entries, 1, #entries - 16) .. struct.pack('>I8I8', kept_at, amount + cost)
  elseif #entries >= 16 * most then
    return UNUSUAL
  else
    entries = entries .. struct.pack('>I8I8', kept_at, cost)
  end
  return fits, struct.pack('>BBI8I8', 1, 4, period, sum + cost) .. entries, kept_at + period, before
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local found = redis.call('MGET', unpack(KEYS))

-- MGET answers nil for a key of another type, which must not be taken for a record that is not there.
local missing = {}
for i = 1, #KEYS do
  if not found[i] then
    missing[#missing + 1] = KEYS[i]
  end
end
if #missing > 0 and redis.call('EXISTS', unpack(missing)) > 0 then
  return redis.error_reply('WRONGTYPE a record of the store has another type')
end

local function answer(verdict, values)
  return { verdict, time[1], time[2], values }
end

for i = #ARGV + 1, #KEYS do
  if found[i] then
    return answer(2, found)
  end
end

local before, writes, denied = {}, {}, false
for i, charge in ipairs(ARGV) do
  local terms, shape = string.byte(charge, 1, 2)
  local bytes = found[i]
  -- A shape that this script does not know, in this version or a later one, is left to core.
  if bytes and string.sub(bytes, 1, 2) ~= string.char(1, shape) then
    return answer(2, found)
  end
  local fits, new, silent, old = shapes[shape](bytes, charge, now)
  if fits == UNUSUAL then
    return answer(2, found)
  end
  -- When the cost will fit depends on every entry of a log.
  before[i] = (fits and old or bytes) or false
  local enforced, charges = terms % 2 == 1, terms >= 2
  denied = denied or (enforced and not fits)
  if charges and fits then
    writes[#writes + 1] = { KEYS[i], new, string.format('%.0f', math.ceil(silent / 1000)) }
  end
end
if denied then
  return answer(0, found)
end
for _, write in ipairs(writes) do
  redis.call('SET', write[1], write[2], 'PXAT', write[3])
end
return answer(1, before)
