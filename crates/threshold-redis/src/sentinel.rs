//! The primary that Redis Sentinel names.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, RedisError, Value};

use super::connect::{self, ConnectError, ConnectOptions};
use super::url::Address;

/// How long one Sentinel may take to answer. Several may have to be asked before one of them is alive, and decisions go on within
/// five seconds of a promotion.
const PATIENCE: Duration = Duration::from_millis(500);

/// The Sentinels of one primary.
#[derive(Debug)]
pub(super) struct Sentinels {
    /// The name under which they know the primary.
    name: String,
    options: ConnectOptions,
    /// In the order in which they are asked: the last one that named a primary is the first.
    addresses: Mutex<Vec<Address>>,
}

impl Sentinels {
    pub(super) fn new(name: String, options: ConnectOptions, addresses: Vec<Address>) -> Self {
        Self { name, options, addresses: Mutex::new(addresses) }
    }

    /// Connects to the primary, with the login and TLS of these options.
    ///
    /// A Sentinel may not have heard of a failover yet. So a server is asked for its role before it is used, and the next Sentinel
    /// is asked if it is not a primary.
    pub(super) async fn open(
        &self,
        options: &ConnectOptions,
    ) -> Result<(MultiplexedConnection, Address), ConnectError> {
        let order = self.addresses.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (mut tried, mut failures) = (Vec::new(), Vec::new());
        for sentinel in order {
            let named = match self.ask(&sentinel).await {
                Ok(Some(named)) => named,
                Ok(None) => {
                    failures.push(format!("Sentinel {sentinel} does not know {}", self.name));
                    continue;
                }
                Err(error) => {
                    failures.push(format!("Sentinel {sentinel}: {}", connect::explain(&error)));
                    continue;
                }
            };
            // The others often name the same server. While it is down there is no use in waiting for it again.
            if tried.contains(&named) {
                continue;
            }
            match connect_to_primary(options, &named).await {
                Ok(connection) => {
                    self.move_to_front(&sentinel);
                    return Ok((connection, named));
                }
                Err(error) => failures.push(error.to_string()),
            }
            tried.push(named);
        }
        Err(ConnectError::NoPrimary(failures.join("; ")))
    }

    /// Asks a Sentinel for the address of the primary.
    async fn ask(&self, sentinel: &Address) -> Result<Option<Address>, RedisError> {
        let asked = async {
            let mut connection = connect::open(&self.options, sentinel).await?;
            let mut call = Cmd::new();
            call.arg("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(&self.name);
            let reply = connection.send_packed_command(&call).await.and_then(Value::extract_error);
            reply.map_err(|error| self.options.first_reply(sentinel, error))
        };
        let reply = tokio::time::timeout(PATIENCE, asked).await;
        let reply = reply.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))?;
        Ok(address(&reply))
    }

    fn move_to_front(&self, sentinel: &Address) {
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = addresses.iter().position(|address| address == sentinel)
            && let Some(ahead) = addresses.get_mut(..=at)
        {
            ahead.rotate_right(1);
        }
    }
}

/// Reads a host and a port. There is none if the Sentinel does not know the name.
fn address(reply: &Value) -> Option<Address> {
    let Value::Array(parts) = reply else { return None };
    let [Value::BulkString(host), Value::BulkString(port)] = parts.as_slice() else { return None };
    let host = str::from_utf8(host).ok()?.to_owned();
    Some(Address::Tcp { host, port: str::from_utf8(port).ok()?.parse().ok()? })
}

async fn connect_to_primary(
    options: &ConnectOptions,
    address: &Address,
) -> Result<MultiplexedConnection, ConnectError> {
    let mut connection = connect::open(options, address).await.map_err(|error| ConnectError::at(address, error))?;
    let mut call = Cmd::new();
    call.arg("ROLE");
    let role = connection.send_packed_command(&call).await.and_then(Value::extract_error);
    let role = role.map_err(|error| ConnectError::at(address, options.first_reply(address, error)))?;
    match role {
        Value::Array(parts) if matches!(parts.first(), Some(Value::BulkString(role)) if role == b"master") => {
            Ok(connection)
        }
        _ => Err(ConnectError::Replica(address.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentinel_that_answered_is_asked_first_the_next_time() {
        let sentinel = |port| Address::Tcp { host: "s".to_owned(), port };
        let url = "redis://s".parse().unwrap();
        let options = ConnectOptions::new(&url, &connect::Certificates::default()).unwrap();
        let sentinels = Sentinels::new("n".to_owned(), options, vec![sentinel(1), sentinel(2), sentinel(3)]);
        sentinels.move_to_front(&sentinel(3));
        sentinels.move_to_front(&sentinel(2));
        assert_eq!(*sentinels.addresses.lock().unwrap(), [sentinel(2), sentinel(3), sentinel(1)]);
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        let text = |text: &str| Value::BulkString(text.into());
        let found = address(&Value::Array(vec![text("10.0.0.1"), text("6379")]));
        assert_eq!(found, Some(Address::Tcp { host: "10.0.0.1".to_owned(), port: 6379 }));
        assert_eq!(address(&Value::Nil), None);
        assert_eq!(address(&Value::Array(vec![text("10.0.0.1"), text("x")])), None);
    }
}
