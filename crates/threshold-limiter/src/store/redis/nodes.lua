#!lua
-- Records a heartbeat of a node, and returns the nodes whose last one still counts.
--
-- KEYS: the sorted set of nodes by the time of their last heartbeat.
-- ARGV: the id of this node, and how many milliseconds a heartbeat counts.
-- Returns the time in milliseconds, and for each node its id and the time of its last heartbeat.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', now - tonumber(ARGV[2])))
-- A clock that was set back would keep nodes that have left for as long as it was ahead.
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%.0f', now), '+inf')
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return { string.format('%.0f', now), redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES') }
