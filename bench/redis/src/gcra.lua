#!lua
-- One limit and nothing else, as a program without a library writes it: GCRA.
--
-- KEYS: the time at which the balance is empty again, in microseconds.
-- ARGV: the microseconds that one request adds, and the most that the balance may hold.
-- Returns whether the request is allowed, and the microseconds to wait if not.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local empty = tonumber(redis.call('GET', KEYS[1]) or 0)
if empty < now then
  empty = now
end
local new = empty + tonumber(ARGV[1])
local wait = new - now - tonumber(ARGV[2])
if wait > 0 then
  return { 0, wait }
end
redis.call('SET', KEYS[1], string.format('%.0f', new), 'PX', math.ceil((new - now) / 1000))
return { 1, 0 }
