// Express. Its login is registered as the first argument says: `post` for one path, `use` for everything below it.
// Prints its port, counts the calls of its login, and reports the count on /health.
'use strict';

const express = require('express');

const app = express();
let calls = 0;

app[process.argv[2]]('/api/login', (_request, response) => {
  calls += 1;
  response.set('X-Login', 'ran').type('text').send('login');
});
app.all('/health', (_request, response) => response.type('text').send(String(calls)));

const server = app.listen(0, '127.0.0.1', () => console.log(server.address().port));
