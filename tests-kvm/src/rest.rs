//! The planner's REST API, spoken by hand: the lane has no other use for an HTTP client.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// How long an answer may take.
const ANSWER_BOUND: Duration = Duration::from_secs(10);

/// An answer of the REST API.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// The body, `Null` if it was no JSON.
    pub body: Value,
}

/// Sends one request and reads its answer.
///
/// # Errors
///
/// Fails if the planner cannot be reached or speaks no HTTP.
pub async fn request(
    address: &str,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> Result<Answer> {
    let exchange = async {
        let mut stream = send(address, method, path, body).await?;
        let (status, _) = read_head(&mut stream).await?;
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.context("read the body")?;
        Ok(Answer { status, body: serde_json::from_slice(&rest).unwrap_or(Value::Null) })
    };
    tokio::time::timeout(ANSWER_BOUND, exchange)
        .await
        .with_context(|| format!("wait for {method} {path}"))?
}

/// Reads a stream of server-sent events until it ends, and returns the data of each.
///
/// # Errors
///
/// Fails if the planner answers with anything else, or does not end the stream within the bound.
pub async fn events(address: &str, path: &str, bound: Duration) -> Result<Vec<Value>> {
    let read = async {
        let mut stream = send(address, "GET", path, None).await?;
        let (status, head) = read_head(&mut stream).await?;
        if status != 200 || !head.to_ascii_lowercase().contains("text/event-stream") {
            bail!("GET {path} answered {status} and is no event stream");
        }
        let mut found = Vec::new();
        let mut line = String::new();
        while stream.read_line(&mut line).await.context("read the events")? > 0 {
            if let Some(data) = line.trim_end().strip_prefix("data:") {
                found.push(
                    serde_json::from_str(data).with_context(|| format!("read event {data}"))?,
                );
            }
            line.clear();
        }
        Ok(found)
    };
    tokio::time::timeout(bound, read)
        .await
        .with_context(|| format!("wait for the end of {path}"))?
}

async fn send(
    address: &str,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> Result<BufReader<TcpStream>> {
    let mut stream =
        TcpStream::connect(address).await.with_context(|| format!("connect to {address}"))?;
    let body = body.map(Value::to_string).unwrap_or_default();
    // HTTP/1.0: the connection ends with the answer, and nothing comes in chunks.
    let head = format!(
        "{method} {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await.context("send the request")?;
    Ok(BufReader::new(stream))
}

async fn read_head(stream: &mut BufReader<TcpStream>) -> Result<(u16, String)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.context("read the answer's head")? == 0 {
            bail!("the connection ended in the answer's head");
        }
    }
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    Ok((status.context("the answer has no status")?, head))
}
