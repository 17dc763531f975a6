#!lua
-- Changes several records in one step, unless one of them has changed since it was read.
--
-- KEYS: the records, then the indexes.
-- ARGV: the number of records; for each record
--   the bytes that it must have ('' for none),
--   its new bytes ('' to delete it),
--   when it expires: Unix milliseconds, '' for never, 'keep' for the time that it has, or 'as N' for that of the Nth record;
-- for each index
--   'add' or 'remove', the member, and its score.
-- Returns whether the records were changed, the time as seconds and microseconds, and what was found.
local count = tonumber(ARGV[1])
local time = redis.call('TIME')
local found = count > 0 and redis.call('MGET', unpack(KEYS, 1, count)) or {}

-- MGET answers nil for a key of another type, which must not be taken for a record that is not there.
local missing = {}
for i = 1, count do
  if not found[i] then
    missing[#missing + 1] = KEYS[i]
  end
end
if #missing > 0 and redis.call('EXISTS', unpack(missing)) > 0 then
  return redis.error_reply('WRONGTYPE a record of the store has another type')
end
-- Fails before the first write if an index has another type.
for i = count + 1, #KEYS do
  redis.call('ZCARD', KEYS[i])
end
for i = 1, count do
  if (found[i] or '') ~= ARGV[3 * i - 1] then
    return { 0, time[1], time[2], found }
  end
end

-- Times are read before the first write, because a record that another one takes its time from may be deleted.
local expiry = {}
for i = 1, count do
  local at = ARGV[3 * i + 1]
  local other = string.match(at, '^as (%d+)$')
  if other then
    local theirs = redis.call('PEXPIRETIME', KEYS[tonumber(other)])
    at = theirs > 0 and string.format('%.0f', theirs) or ''
  end
  expiry[i] = at
end
for i = 1, count do
  local bytes, at = ARGV[3 * i], expiry[i]
  if bytes == '' then
    redis.call('DEL', KEYS[i])
  elseif at == '' then
    redis.call('SET', KEYS[i], bytes)
  elseif at == 'keep' then
    redis.call('SET', KEYS[i], bytes, 'KEEPTTL')
  else
    redis.call('SET', KEYS[i], bytes, 'PXAT', at)
  end
end
for i = count + 1, #KEYS do
  local verb, member, score = ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
  if verb == 'add' then
    redis.call('ZADD', KEYS[i], score, member)
    -- An index outlives its last member by a day. 'GT' alone would leave a new index without a time.
    local ends = string.format('%.0f', tonumber(score) + 86400000)
    redis.call('PEXPIREAT', KEYS[i], ends, 'NX')
    redis.call('PEXPIREAT', KEYS[i], ends, 'GT')
  else
    redis.call('ZREM', KEYS[i], member)
  end
end
return { 1, time[1], time[2], found }
