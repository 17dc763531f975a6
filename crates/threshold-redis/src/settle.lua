-- Charges a request to all of its limits, or to none, and returns what was there. `charge.lua` stands before this text.
--
-- KEYS: the balances of the charges, the standings of the subjects, the head of the partition; to hold what is charged, the
--   reservation and the index of those that expire.
-- ARGV: the figures of all charges one after another, as `Bill::to_script` in core packs them; '1' for a sample, otherwise '';
--   eight random bytes, for the history of a partition that has none ('' while it is moved: then its head is left out); what is held ('' for nothing): how long and whether it is
--   released then (1) or not (0), how long its record is kept after that, and what core keeps of it; for each standing the bytes
--   that it must have ('' for none); the time after which nothing is charged ('' for none).
-- Returns one string: a verdict (1 byte, 16 more if a reservation has expired), the time in microseconds (8 bytes), the history (8
-- bytes), and for each record its length (4 bytes, 0 for none) and what was found:
--   1  charged, and for each charge its balance before that; of a long one with room only what core needs. For a
--      sample each balance whole, and then what was written in its place
--   0  nothing charged: an enforced limit is full. The bytes of every record
--   2  nothing charged: the script cannot tell. The bytes of every record
--   3  nothing charged: it is too late. Nothing else
--
-- One string as the reply is cheaper than a list, whose length Redis has to write afterwards.
local latest, holds = ARGV[#ARGV], ARGV[4] ~= ''
if latest ~= '' and now > read('>I8', latest) then
  return write('>BI8I8', 3, now, 0)
end

local has_head = ARGV[3] ~= ''
local records = #KEYS - (holds and 3 or (has_head and 1 or 0))
-- The head and the reservation are read in the same step, and are not returned.
local all = records + (holds and 2 or (has_head and 1 or 0))
local found = call('MGET', unpack(KEYS, 1, all))

-- MGET answers nil for a key of another type, which must not be taken for a record that is not there.
local missing
for i = 1, all do
  if not found[i] then
    missing = missing or {}
    missing[#missing + 1] = KEYS[i]
  end
end
if missing and call('EXISTS', unpack(missing)) > 0 then
  return redis.error_reply('WRONGTYPE a record of the store has another type')
end

local head = has_head and found[records + 1]
local history, next_expiry = '\0\0\0\0\0\0\0\0', 0
if head then
  if byte(head) ~= 1 then
    return redis.error_reply('ERR a record of the store has an unknown version')
  end
  history, next_expiry = sub(head, 2, 9), read('>I8', head, 10)
end

local function answer(verdict, values, count)
  if next_expiry > 0 and next_expiry <= now then
    verdict = verdict + 16
  end
  local parts = { write('>BI8', verdict, now) .. history }
  for i = 1, count do
    local bytes = values[i]
    parts[i + 1] = bytes and write('>I4c0', #bytes, bytes) or '\0\0\0\0'
  end
  return table.concat(parts)
end

-- Of two decisions with one id, the second is left to core.
if holds and found[all] then
  return answer(2, found, records)
end

local charges, at, count = ARGV[1], 1, 0
-- What is written for each charge: its new bytes, and when they fall silent; `false` if that is when they did before.
local news, silents, denied = {}, {}, false
-- What core has to know of a long balance with room, and what is held.
local digests, held
while at <= #charges do
  count = count + 1
  local bytes, prefix, terms = found[count], nil, byte(charges, at)
  if bytes and byte(bytes, 2) == 7 and byte(bytes) == 1 then
    -- Denied until a time, and what would count without that.
    if read('>I8', bytes, 3) > now then
      return answer(2, found, records)
    end
    prefix, bytes = sub(bytes, 1, 10), #bytes > 10 and sub(bytes, 11) or nil
  end
  local after, fits, new, silent, part, fraction, counts_until, short = charge(bytes, charges, at)
  if not after then
    return answer(2, found, records)
  end
  at = after
  if short and fits then
    digests = digests or {}
    digests[count] = short
  end
  local is_made = fits or terms >= 4 and terms % 2 == 1
  if is_made then
    if terms % 4 >= 2 then
      news[count], silents[count] = prefix and prefix .. new or new, silent
    end
  elseif terms % 2 == 1 then
    denied = true
  end
  if holds then
    held = (held or '') .. write('>BI8I8I8', is_made and (news[count] and 2 or 1) or 0, part, fraction, counts_until)
  end
end

for i = count + 1, records do
  if (found[i] or '') ~= ARGV[i - count + 4] then
    return answer(2, found, records)
  end
end
if denied then
  return answer(0, found, records)
end
if holds then
  -- Fails before the first write if the index has another type.
  call('ZCARD', KEYS[records + 3])
  -- And if the user may not write it.
  local check = redis.acl_check_cmd
  if check and not (check('ZADD', KEYS[1], '0', '0') and check('PEXPIREAT', KEYS[1], '0')) then
    return redis.error_reply('NOPERM the user may not run a command of the script')
  end
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
if holds then
  local ttl, is_released, kept, planned = read('>I8BI8', ARGV[4])
  if not head then
    history = ARGV[3]
  end
  local millis = format('%d', (now + ttl + 999) / 1000)
  local record = write('>BI8I8', 255, now, now + ttl) .. history .. string.char(count) .. held .. sub(ARGV[4], planned)
  call('SET', KEYS[records + 2], record, 'PXAT', format('%d', (now + ttl + kept + 999) / 1000))
  if is_released == 1 then
    local index = KEYS[records + 3]
    call('ZADD', index, millis, sub(KEYS[records + 2], -32))
    -- An index outlives its last member. 'GT' alone would leave a new index without a time.
    local ends = format('%d', (now + ttl + kept + 999) / 1000)
    call('PEXPIREAT', index, ends, 'NX')
    call('PEXPIREAT', index, ends, 'GT')
    local expiry = tonumber(millis) * 1000
    if next_expiry == 0 or expiry < next_expiry then
      head, next_expiry = nil, expiry
    end
  end
end
if has_head and not head and (holds or next(news)) then
  if history == '\0\0\0\0\0\0\0\0' then
    history = ARGV[3]
  end
  call('SET', KEYS[records + 1], '\1' .. history .. write('>I8', next_expiry))
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
