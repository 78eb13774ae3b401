//! HTTP requests that are well-formed, or nearly.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::dice::Dice;
use super::{Prey, Reaction, definition, noise};
use crate::wait::let_pass;

/// How long the sender waits for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// One request and what its answer has to be.
#[derive(Clone, Debug)]
pub struct Exchange {
    head: Vec<u8>,
    body: Vec<u8>,
    pace: Pace,
    answer: Expected,
}

/// How fast a body is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// At once.
    Whole,
    /// A byte at a time, and then no more.
    Dripping,
}

/// What the answer has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// If it is a refusal: JSON with a code and a message.
    Telling,
    /// Whatever the HTTP library makes of it.
    Any,
}

const METHODS: [&str; 9] =
    ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "x-no-such-method"];

fn exchange(method: &str, path: &str, body: Vec<u8>) -> Exchange {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    // A HEAD has no body in its answer.
    let answer = if method == "HEAD" { Expected::Any } else { Expected::Telling };
    Exchange { head: head.into_bytes(), body, pace: Pace::Whole, answer }
}

/// Writes a text as it may stand in a path; a few bytes stay as nobody may write them.
fn segment(text: &str, dice: &mut Dice) -> String {
    const BROKEN: [&str; 4] = ["%", "%zz", "%ff%fe", "%c3%28"];
    if dice.below(4) == 0 {
        return dice.pick(&BROKEN).to_owned();
    }
    text.bytes()
        .take(4000)
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => {
                char::from(byte).to_string()
            }
            other => format!("%{other:02x}"),
        })
        .collect()
}

/// Makes a request to the planner.
pub fn planner(prey: &Prey, dice: &mut Dice) -> Exchange {
    match dice.below(12) {
        0 => exchange(dice.pick(&METHODS), dice.pick(&PATHS), Vec::new()),
        1..4 => {
            let name = noise::text(dice);
            let name = segment(&name, dice);
            let (method, path) = dice.pick(&[
                ("GET", "/api/hosts/{}"),
                ("GET", "/api/vms/{}"),
                ("POST", "/api/vms/{}/start"),
                ("POST", "/api/vms/{}/stop"),
                ("GET", "/api/migrations/{}"),
                ("GET", "/api/migrations/{}/events"),
                ("POST", "/api/migrations/{}/cancel"),
                ("GET", "/{}"),
            ]);
            exchange(method, &path.replace("{}", &name), Vec::new())
        }
        4 => {
            let value = noise::text(dice);
            let value = segment(&value, dice);
            let query = dice.pick(&["limit=", "open=", "vm=", "stuck=", "no-such-field=", "&=&&"]);
            exchange("GET", &format!("/api/migrations?{query}{value}"), Vec::new())
        }
        5 => ill_mannered(dice),
        6..9 => exchange(
            "POST",
            dice.pick(&[
                "/api/migrations",
                "/api/vms",
                "/api/vms/nobody/start",
                "/api/vms/nobody/stop",
            ]),
            no_message(dice),
        ),
        _ => {
            let (path, body) = message(prey, dice);
            exchange("POST", &path, body.to_string().into_bytes())
        }
    }
}

const PATHS: [&str; 9] = [
    "/",
    "/api/vms",
    "/api/hosts",
    "/api/migrations",
    "/api/../../etc/passwd",
    "/api//vms",
    "/metrics",
    "/healthz",
    "/readyz",
];

/// Makes a body that is no message: no JSON, or of the wrong shape.
fn no_message(dice: &mut Dice) -> Vec<u8> {
    match dice.below(12) {
        0 => vec![b'['; 100_000],
        1 => b"{\"a\":".repeat(20_000),
        2 => dice.bytes(500),
        3 => [b"{\"vm_name\": \"", dice.bytes(30).as_slice(), b"\"}"].concat(),
        4 => format!("{{\"vm_name\": \"{}\"}}", "x".repeat(3 << 20)).into_bytes(),
        5 => format!("{{\"bandwidth_mbps\": {}}}", "9".repeat(10_000)).into_bytes(),
        _ => dice
            .pick(&[
                "null",
                "[]",
                "7",
                "\"text\"",
                "{\"vm_name\": {\"a\": 1}}",
                "{\"vm_name\": null}",
                "{\"timeout_ms\": -1}",
                "{\"timeout_ms\": 1e400}",
                "{\"timeout_ms\": \"1\"}",
                "{\"compress\": 2}",
                "{\"no_such_field\": 1}",
                "{\"vm_name\": \"a\", \"vm_name\": \"b\"}",
                "{\"vm_name\": \"\\ud800\"}",
                "{\"wait_ms\": 18446744073709551616}",
                "{\"definition\": [\"a\"]}",
                "{",
            ])
            .as_bytes()
            .to_vec(),
    }
}

/// Makes a message of the right shape that cannot be carried out.
fn message(prey: &Prey, dice: &mut Dice) -> (String, Value) {
    match dice.below(4) {
        0 => {
            // To where it is: nothing comes of it, whatever the numbers.
            let body = serde_json::json!({
                "vm_name": prey.name, "target_host": prey.host,
                "bandwidth_mbps": noise::number(dice), "timeout_ms": noise::number(dice),
                "downtime_limit_ms": noise::number(dice), "hold_limit_ms": noise::number(dice),
                "queue_deadline_ms": noise::number(dice),
            });
            ("/api/migrations".to_owned(), body)
        }
        1 => {
            let body = serde_json::json!({
                "vm_name": noise::text(dice), "target_host": noise::text(dice),
                "migration_type": noise::text(dice), "method": noise::text(dice),
                "request_id": noise::text(dice),
            });
            ("/api/migrations".to_owned(), body)
        }
        2 => {
            let body = serde_json::json!({
                "how": "by magic", "deadline_ms": noise::number(dice), "wait_ms": 1,
            });
            (format!("/api/vms/{}/stop", prey.name), body)
        }
        _ => {
            let body = serde_json::json!({
                "definition": definition::unusable(dice), "host": prey.host, "wait_ms": 1000,
            });
            ("/api/vms".to_owned(), body)
        }
    }
}

/// Makes a request that is a burden rather than wrong.
fn ill_mannered(dice: &mut Dice) -> Exchange {
    let start = "POST /api/migrations HTTP/1.1\r\nHost: x\r\nConnection: close\r\n";
    let (head, body, pace) = match dice.below(6) {
        0 => {
            let flood: String = (0..2000).map(|at| format!("X-{at}: y\r\n")).collect();
            (format!("{start}{flood}\r\n"), Vec::new(), Pace::Whole)
        }
        1 => (format!("{start}X-Long: {}\r\n\r\n", "y".repeat(1 << 20)), Vec::new(), Pace::Whole),
        2 => (
            format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "p".repeat(100_000)),
            Vec::new(),
            Pace::Whole,
        ),
        3 => (
            format!("{start}Content-Length: 1000000000000000000\r\n\r\n"),
            vec![b'{'; 10],
            Pace::Dripping,
        ),
        4 => (format!("{start}Content-Length: 4000\r\n\r\n"), vec![b' '; 20], Pace::Dripping),
        _ => (
            format!("{start}Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"),
            Vec::new(),
            Pace::Dripping,
        ),
    };
    Exchange { head: head.into_bytes(), body, pace, answer: Expected::Any }
}

/// Makes a request to an agent's metrics.
pub fn metrics(dice: &mut Dice) -> Exchange {
    let mut exchange = match dice.below(4) {
        0 => ill_mannered(dice),
        1 => {
            let name = noise::text(dice);
            exchange("GET", &format!("/{}", segment(&name, dice)), Vec::new())
        }
        2 => exchange(dice.pick(&METHODS), dice.pick(&PATHS), no_message(dice)),
        _ => exchange("GET", "/metrics", Vec::new()),
    };
    // What is read by machines only is refused by the HTTP library.
    exchange.answer = Expected::Any;
    exchange
}

/// Sends a request and judges its answer.
pub(super) async fn send(address: &str, exchange: &Exchange) -> Result<Reaction> {
    let mut stream = TcpStream::connect(address).await.context("connect")?;
    if stream.write_all(&exchange.head).await.is_err() {
        return Ok(Reaction::Closed);
    }
    match exchange.pace {
        // It may be refused before it is read: the answer comes all the same.
        Pace::Whole => drop(stream.write_all(&exchange.body).await),
        Pace::Dripping => {
            for byte in &exchange.body {
                if stream.write_all(&[*byte]).await.is_err() {
                    return Ok(Reaction::Closed);
                }
                let_pass(Duration::from_millis(5)).await;
            }
            return Ok(Reaction::Left);
        }
    }
    let mut answer = Vec::new();
    let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    if answer.is_empty() {
        return Ok(if read.is_err() { Reaction::Left } else { Reaction::Closed });
    }
    judge(exchange, &answer)
}

/// Fails if an answer tells its reader nothing.
fn judge(exchange: &Exchange, answer: &[u8]) -> Result<Reaction> {
    let (status, body) = split(answer)?;
    if exchange.answer == Expected::Telling && status >= 400 {
        let told: Option<Value> = serde_json::from_slice(body).ok();
        let telling = |field: &str| {
            let text = told.as_ref().and_then(|told| told[field].as_str());
            text.is_some_and(|text| !text.is_empty())
        };
        let refused = || {
            let head: String = String::from_utf8_lossy(&exchange.head).chars().take(200).collect();
            let sent: String = String::from_utf8_lossy(&exchange.body).chars().take(200).collect();
            let got: String = String::from_utf8_lossy(answer).chars().take(400).collect();
            format!("{head}{sent} was answered with {got}")
        };
        if !telling("code") || !telling("message") {
            bail!("a refusal without code or message: {}", refused());
        }
        if status == 500 {
            bail!("the planner blames itself: {}", refused());
        }
    }
    Ok(Reaction::Answered(status.to_string()))
}

fn split(answer: &[u8]) -> Result<(u16, &[u8])> {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").context("find the body")?;
    let head = String::from_utf8_lossy(&answer[..end]);
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    Ok((status.context("read the status")?, &answer[end + 4..]))
}

/// Asks for a page and returns its text.
///
/// # Errors
///
/// Fails unless it is there.
pub async fn get(address: &str, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).await.context("connect")?;
    // HTTP/1.0: nothing comes in chunks.
    let head = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.context("ask")?;
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer))
        .await
        .with_context(|| format!("wait for {path}"))?
        .context("read the answer")?;
    let (status, body) = split(&answer)?;
    if status != 200 {
        bail!("GET {path} answered {status}");
    }
    Ok(String::from_utf8_lossy(body).into_owned())
}
