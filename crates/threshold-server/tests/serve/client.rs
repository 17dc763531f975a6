//! A minimal HTTP/1.1 client over any stream, which sends exactly the given bytes.

use std::io::{self, BufRead as _, BufReader, Read, Write};

use serde_json::Value;

/// One connection.
pub(crate) struct Client<S: Read + Write>(BufReader<S>);

/// A response.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Names are in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl<S: Read + Write> Client<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self(BufReader::new(stream))
    }

    /// Posts JSON and reads the response.
    pub(crate) fn post(&mut self, path: &str, body: &str) -> io::Result<Answer> {
        self.send("POST", path, &[("content-type", "application/json")], body)
    }

    pub(crate) fn send(&mut self, method: &str, path: &str, fields: &[(&str, &str)], body: &str) -> io::Result<Answer> {
        let host = Some(("host", "localhost")).filter(|(host, _)| fields.iter().all(|(name, _)| name != host));
        let fields = host.iter().chain(fields).map(|(name, value)| format!("{name}: {value}\r\n"));
        let (fields, length): (String, usize) = (fields.collect(), body.len());
        self.write(&format!("{method} {path} HTTP/1.1\r\n{fields}content-length: {length}\r\n\r\n{body}"))?;
        self.read()
    }

    /// Sends a head with exactly these fields, and a Host if there is none. The body of the response, which may never end, is read
    /// only if it has a length.
    pub(crate) fn ask_bytes(&mut self, method: &str, path: &str, fields: &[(String, Vec<u8>)]) -> io::Result<Answer> {
        self.write_head(method, path, fields)?;
        let mut answer = self.read_head()?;
        let length = answer.header("content-length").filter(|_| method != "HEAD");
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap_or(0))];
        self.0.read_exact(&mut body)?;
        answer.body = String::from_utf8(body).map_err(io::Error::other)?;
        Ok(answer)
    }

    fn write_head(&mut self, method: &str, path: &str, fields: &[(String, Vec<u8>)]) -> io::Result<()> {
        let host = if fields.iter().any(|(name, _)| name == "host") { "" } else { "host: localhost\r\n" };
        let mut head = format!("{method} {path} HTTP/1.1\r\n{host}").into_bytes();
        for (name, value) in fields {
            head.extend_from_slice(&[name.as_bytes(), b": ", value, b"\r\n"].concat());
        }
        head.extend_from_slice(b"\r\n");
        self.write_bytes(&head)
    }

    /// Sends a HEAD request.
    pub(crate) fn send_head(&mut self, path: &str) -> io::Result<Answer> {
        self.write(&format!("HEAD {path} HTTP/1.1\r\nhost: localhost\r\n\r\n"))?;
        self.read_head()
    }

    /// Sends a line on an upgraded connection, and reads one.
    pub(crate) fn echo(&mut self, line: &str) -> String {
        self.write(&format!("{line}\n")).unwrap();
        self.line().unwrap()
    }

    pub(crate) fn write(&mut self, text: &str) -> io::Result<()> {
        self.write_bytes(text.as_bytes())
    }

    pub(crate) fn write_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.get_mut().write_all(bytes)
    }

    pub(crate) fn read(&mut self) -> io::Result<Answer> {
        let (mut answer, body) = self.read_bytes()?;
        answer.body = String::from_utf8(body).map_err(io::Error::other)?;
        Ok(answer)
    }

    /// Reads a response whose body may not be UTF-8, and discards the body.
    pub(crate) fn read_bytes(&mut self) -> io::Result<(Answer, Vec<u8>)> {
        let answer = self.read_head()?;
        if answer.header("transfer-encoding") == Some("chunked") {
            return Ok((answer, self.read_chunks()?));
        }
        let length = answer.header("content-length").map_or(0, |value| value.parse().unwrap_or(0));
        let mut body = vec![0; length];
        self.0.read_exact(&mut body)?;
        Ok((answer, body))
    }

    fn read_chunks(&mut self) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let length = usize::from_str_radix(&self.line()?, 16).map_err(io::Error::other)?;
            let mut chunk = vec![0; length];
            self.0.read_exact(&mut chunk)?;
            self.line()?;
            if chunk.is_empty() {
                return Ok(body);
            }
            body.append(&mut chunk);
        }
    }

    fn read_head(&mut self) -> io::Result<Answer> {
        let status = self.line()?;
        let status = status.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.ok_or_else(|| io::Error::other("no status"))?;
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        Ok(Answer { status, headers, body: String::new() })
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        if self.0.read_until(b'\n', &mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
    }
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.body))
    }
}
