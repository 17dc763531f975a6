#!lua flags=no-writes
-- Reads records and the server's time in one step.
--
-- KEYS: the records.
-- Returns the time as seconds and microseconds, and the bytes of each record (nil where there is none).
local time = redis.call('TIME')
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
return { time[1], time[2], found }
