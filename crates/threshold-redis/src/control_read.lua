#!lua flags=no-writes
-- Reads the changes of bans and settings after a number.
--
-- KEYS: meta, order, changes, as in control_add.lua.
-- ARGV: the number, and the largest number of changes to return.
-- Returns the last number, the last forgotten one, when the log began in microseconds, and for each change its number and its bytes.
local meta = redis.call('HMGET', KEYS[1], 'last', 'forgotten', 'began')
local page = { meta[1] or '0', meta[2] or '0', meta[3] or '0' }
local found = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
for i = 1, #found, 2 do
  page[#page + 1] = found[i + 1]
  page[#page + 1] = redis.call('HGET', KEYS[3], found[i])
end
return page
