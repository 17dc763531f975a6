#!lua flags=no-writes
-- Reads records and the server's time in one step.
--
-- KEYS: the records.
-- Returns the time as seconds and microseconds, and the bytes of each record (nil where there is none).
local time = redis.call('TIME')
return { time[1], time[2], redis.call('MGET', unpack(KEYS)) }
