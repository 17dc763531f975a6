#!lua flags=no-writes
-- Reads which reservations of a partition have expired.
--
-- KEYS: the index of the partition.
-- ARGV: the largest number to return.
-- Returns the ids, each followed by its time in milliseconds.
local time = redis.call('TIME')
-- Rounded down, and scores are rounded up: no reservation is ended before its time.
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
return redis.call('ZRANGE', KEYS[1], '-inf', string.format('%.0f', now), 'BYSCORE', 'LIMIT', 0, ARGV[1], 'WITHSCORES')
