//! The planner's REST API, spoken by hand: there is no other use for an HTTP client here.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// How long an answer may take.
const BOUND: Duration = Duration::from_secs(10);

/// An answer: the HTTP status and the body, `Null` if it was no JSON.
pub(crate) type Answer = (u16, Value);

/// Sends one request and reads its answer.
pub(crate) async fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> Result<Answer> {
    let body = body.map(Value::to_string).unwrap_or_default();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.context("connect")?;
        stream.write_all(format!("{head}{body}").as_bytes()).await.context("send")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.context("receive")?;
        read(&answer)
    };
    tokio::time::timeout(BOUND, exchange)
        .await
        .with_context(|| format!("wait for {method} {path}"))?
}

fn read(answer: &[u8]) -> Result<Answer> {
    let text = String::from_utf8_lossy(answer);
    let Some((head, rest)) = text.split_once("\r\n\r\n") else { bail!("is no HTTP: {text:?}") };
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.with_context(|| format!("has no status: {head:?}"))?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { unchunked(rest)? } else { rest.to_owned() };
    Ok((status, serde_json::from_str(&body).unwrap_or(Value::Null)))
}

fn unchunked(mut rest: &str) -> Result<String> {
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n").context("a chunk has no size")?;
        let size = usize::from_str_radix(size.trim(), 16).context("a chunk has no size")?;
        if size == 0 {
            return Ok(body);
        }
        body.push_str(after.get(..size).context("a chunk is cut")?);
        rest = after.get(size + 2..).context("a chunk is cut")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_of_either_form_is_read() {
        let plain = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
        assert_eq!(read(plain).unwrap(), (200, serde_json::json!({})));
        let chunked = b"HTTP/1.1 409 x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{\"a\r\n4\r\n\":1}\r\n0\r\n\r\n";
        assert_eq!(read(chunked).unwrap(), (409, serde_json::json!({"a": 1})));
        assert!(read(b"SSH-2.0").is_err());
    }
}
