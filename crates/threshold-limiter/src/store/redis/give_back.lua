#!lua
-- Gives charges back, each as far as it still counts, or changes nothing. The same as `Receipt::refund` in core, without a comparison
-- of what was read: other nodes may charge the same balances all the time.
--
-- KEYS: the balances of the charges.
-- ARGV: the figures of all charges one after another, as `Adjustment::to_script` in core packs them.
-- Returns whether the charges were given back, and the time as seconds and microseconds. If not, core has to do it: a balance has a
-- shape that this script does not know, or has to remember what was given back.
local call, read, write, format = redis.call, struct.unpack, struct.pack, string.format
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local found = call('MGET', unpack(KEYS))
local unknown = { 0, time[1], time[2] }

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

local charges, at, count = ARGV[1], 1, 0
-- The new bytes of each balance ('' to delete it), and when they fall silent; `false` if that is when they did before.
local news, silents = {}, {}
while at <= #charges do
  count = count + 1
  local bytes, shape = found[count], string.byte(charges, at + 1)
  if bytes then
    local version, own_shape = string.byte(bytes, 1, 2)
    if version ~= 1 or own_shape ~= shape then
      return unknown
    end
  end
  local new, silent
  if shape == 1 then
    -- A token bucket: the time at which it is full again, in microseconds and a fraction.
    local quota, period, parts, charged_at, counts_until, part, fraction, less, less_fraction
    quota, period, parts, charged_at, counts_until, part, fraction, less, less_fraction, at =
      read('>I8I8I8I8I8I8I8I8I8', charges, at + 2)
    if bytes and now >= charged_at and now < counts_until then
      local full, rest, own_quota, own_period = read('>I8I8I8I8', bytes, 3)
      if own_quota == quota and own_period == period then
        if full > part or (full == part and rest > fraction) then
          -- There are later charges, so the bucket has to remember what was given back.
          return unknown
        elseif full == part and rest == fraction then
          if less > full - now or (less == full - now and less_fraction >= rest) then
            new = ''
          else
            full, rest = full - less, rest - less_fraction
            if rest < 0 then
              full, rest = full - 1, rest + parts
            end
            new, silent = write('>BBI8I8I8I8', 1, 1, full, rest, quota, period), full + (rest > 0 and 1 or 0)
          end
        end
      end
    end
  else
    local period, charged_at, part, amount
    period, charged_at, part, amount, at = read('>I8I8I8I8', charges, at + 2)
    if bytes and now >= charged_at then
      if shape == 2 then
        -- A fixed window: its beginning and its count.
        local start, used, own_period = read('>I8I8I8', bytes, 3)
        if own_period == period and start == part then
          used = math.max(used - amount, 0)
          new, silent = write('>BBI8I8I8', 1, 2, start, used, period), used == 0 and start
        end
      elseif shape == 3 then
        -- A sliding estimate: the beginning of the current window, its count and that of the window before.
        local start, current, previous, own_period = read('>I8I8I8I8', bytes, 3)
        if own_period == period and (start == part or start == part + period) then
          if start == part then
            current = math.max(current - amount, 0)
          else
            previous = math.max(previous - amount, 0)
          end
          new = write('>BBI8I8I8I8', 1, 3, start, current, previous, period)
          silent = current > 0 and start + 2 * period or (previous > 0 and start + period or start)
        end
      else
        -- A sliding log or window: entries of a time and a cost, oldest first, after the period and the sum of the costs.
        local own_period, sum = read('>I8I8', bytes, 3)
        -- From the end, because most charges are given back soon.
        local place = own_period == period and #bytes - 15 or 0
        while place >= 19 do
          local entry, cost = read('>I8I8', bytes, place)
          if entry <= part then
            if entry == part then
              local left = math.max(cost - amount, 0)
              local kept = left > 0 and write('>I8I8', entry, left) or ''
              local entries = string.sub(bytes, 19, place - 1) .. kept .. string.sub(bytes, place + 16)
              new = write('>BBI8I8', 1, 4, period, sum - (cost - left)) .. entries
              silent = #entries > 0 and read('>I8', entries, #entries - 15) + period or 0
            end
            break
          end
          place = place - 16
        end
      end
    end
  end
  news[count], silents[count] = new, silent or false
end

for i = 1, count do
  local new, silent = news[i], silents[i]
  if new == '' or (new and silent and silent <= now) then
    call('DEL', KEYS[i])
  elseif new and silent then
    call('SET', KEYS[i], new, 'PXAT', format('%d', (silent + 999) / 1000))
  elseif new then
    call('SET', KEYS[i], new, 'KEEPTTL')
  end
end
return { 1, time[1], time[2] }
