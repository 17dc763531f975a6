// Stands between a client and the socket of an upstream, and sees when they end.

// Returns the client's end of a new pair, and a promise that resolves when either side has ended.
export function relay(upstream) {
  const [client, server] = Object.values(new WebSocketPair());
  const ended = new Promise((resolve) => {
    const forward = (from, to) => {
      // Blobs cannot be sent.
      from.binaryType = "arraybuffer";
      const end = (code, reason) => {
        try {
          to.close(code, reason);
        } catch {
          // It has ended already.
        }
        resolve();
      };
      from.addEventListener("message", (event) => {
        try {
          to.send(event.data);
        } catch {
          end(1011);
        }
      });
      // 1005 and 1006 mean that no code was received. They cannot be sent.
      from.addEventListener("close", (event) => (event.code === 1005 || event.code === 1006 ? end() : end(event.code, event.reason)));
      from.addEventListener("error", () => end(1011));
    };
    forward(upstream, server);
    forward(server, upstream);
    upstream.accept();
    server.accept();
  });
  return { client, ended };
}
