//! Bytes that are no protocol, or not quite one.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::Reaction;
use super::dice::Dice;

/// How long the sender waits for the other end to close.
const PATIENCE: Duration = Duration::from_secs(2);

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What is sent, and how the sender goes.
#[derive(Clone, Debug)]
pub struct Bytes {
    bytes: Vec<u8>,
    leaving: Leaving,
}

/// How a sender goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    /// It says that it has sent all, and waits.
    HalfClosed,
    /// It is gone at once.
    Abrupt,
}

fn bytes(bytes: Vec<u8>, dice: &mut Dice) -> Bytes {
    let leaving = if dice.below(4) == 0 { Leaving::Abrupt } else { Leaving::HalfClosed };
    Bytes { bytes, leaving }
}

/// Makes noise.
pub fn any(dice: &mut Dice) -> Bytes {
    let count = dice.length(2048);
    let noise = match dice.below(6) {
        0 => Vec::new(),
        1 => vec![0; count],
        2 => vec![0xff; count],
        // The beginning of TLS: somebody thinks that this is https.
        3 => [&[0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3], dice.bytes(200).as_slice()].concat(),
        _ => dice.bytes(count),
    };
    bytes(noise, dice)
}

/// Makes HTTP/1 that ends too early or is none.
pub fn http1(dice: &mut Dice) -> Bytes {
    const WHOLE: &[u8] = b"POST /api/migrations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 40\r\n\r\n{\"vm_name\":";
    const LINES: [&[u8]; 13] = [
        b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET  /  HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nHost x\n\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /api/vms HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /",
        b"POST /api/vms HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{",
        b"POST /api/vms HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        b"CONNECT other:25 HTTP/1.1\r\nHost: other:25\r\n\r\n",
        b"GET http://169.254.169.254/ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAAA\r\n\r\n",
    ];
    let broken = if dice.below(3) == 0 {
        WHOLE[..dice.length(u64::try_from(WHOLE.len()).unwrap_or(1))].to_vec()
    } else {
        dice.pick(&LINES).to_vec()
    };
    bytes(broken, dice)
}

/// Makes HTTP/2 whose frames are wrong, or whose gRPC is.
pub fn http2(dice: &mut Dice) -> Bytes {
    if dice.below(8) == 0 {
        return bytes(PREFACE[..dice.length(24)].to_vec(), dice);
    }
    let mut out = [PREFACE, &frame(4, 0, 0, &[])].concat();
    out.extend(match dice.below(3) {
        0 => misframed(dice),
        1 => out_of_place(dice),
        _ => broken_call(dice),
    });
    bytes(out, dice)
}

/// Frames whose length or content cannot be.
fn misframed(dice: &mut Dice) -> Vec<u8> {
    let (kind, flags, stream) = (dice.byte() % 12, dice.byte(), dice.pick(&[0, 1, 2, u32::MAX]));
    match dice.below(6) {
        0 => frame_of_length(0x00ff_ffff, (kind, flags, stream), &dice.bytes(64)),
        1 => frame_of_length(100, (kind, flags, stream), &dice.bytes(3)),
        2 => frame(4, 0, 0, &dice.bytes(5)),
        3 => frame(6, 0, 0, &dice.bytes(7)),
        4 => frame(1, 4, 1, &dice.bytes(60)),
        _ => {
            let count = dice.length(300);
            dice.bytes(count)
        }
    }
}

/// Frames that may not come here, or not so often.
fn out_of_place(dice: &mut Dice) -> Vec<u8> {
    let headers = headers("/vmferry.v1.Planner/ListVms");
    match dice.below(9) {
        0 => frame(1, 4, 0, &headers),
        1 => frame(1, 4, 2, &headers),
        2 => frame(0, 0, 7, b"data before any headers"),
        3 => frame(8, 0, 0, &[0, 0, 0, 0]),
        4 => [frame(8, 0, 0, &[0x7f, 0xff, 0xff, 0xff]), frame(8, 0, 0, &[0x7f, 0xff, 0xff, 0xff])]
            .concat(),
        5 => frame(9, 4, 1, &headers),
        6 => frame(1, 0, 1, &headers),
        7 => {
            (0..100).flat_map(|_| [frame(4, 0, 0, &[]), frame(6, 0, 0, &[0; 8])].concat()).collect()
        }
        // Opened and reset, again and again.
        _ => (0..100)
            .flat_map(|at| {
                let stream = 2 * at + 1;
                [frame(1, 4, stream, &headers), frame(3, 0, stream, &[0, 0, 0, 8])].concat()
            })
            .collect(),
    }
}

/// A call that begins well and whose message does not.
fn broken_call(dice: &mut Dice) -> Vec<u8> {
    let path = dice.pick(&[
        "/vmferry.v1.Planner/StartVm",
        "/vmferry.v1.Planner/Report",
        "/vmferry.v1.Agent/Execute",
        "/vmferry.v1.Agent/Claim",
        "/vmferry.v1.Agent/Watch",
        "/",
        "*",
        "/../../x",
    ]);
    let data: Vec<u8> = match dice.below(6) {
        // The prefix says more than there is, or less, or the most there can be.
        0 => [&[0, 0, 0, 0, 100], dice.bytes(3).as_slice()].concat(),
        1 => [&[0, 0, 0, 0, 1], dice.bytes(30).as_slice()].concat(),
        2 => [&[0, 0xff, 0xff, 0xff, 0xff], dice.bytes(30).as_slice()].concat(),
        // Compressed, it says, and nobody said how.
        3 => [&[1, 0, 0, 0, 10], dice.bytes(10).as_slice()].concat(),
        4 => [&[7, 0, 0, 0, 10], dice.bytes(10).as_slice()].concat(),
        _ => vec![0, 0],
    };
    let last = dice.pick(&[0, 1]);
    [frame(1, 4, 1, &headers(path)), frame(0, last, 1, &data)].concat()
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or_default();
    frame_of_length(length, (kind, flags, stream), payload)
}

/// Writes a frame whose length is what it says, not what it is.
fn frame_of_length(length: u32, (kind, flags, stream): (u8, u8, u32), payload: &[u8]) -> Vec<u8> {
    let mut out = length.to_be_bytes()[1..].to_vec();
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend_from_slice(payload);
    out
}

/// Writes the headers of a gRPC call: literals, without a table.
fn headers(path: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        out.push(0);
        for text in [name, value] {
            // All of them are shorter than 127 bytes: one byte says how long they are.
            out.push(u8::try_from(text.len()).unwrap_or_default());
            out.extend_from_slice(text.as_bytes());
        }
    }
    out
}

/// Sends bytes on a connection of their own and waits for its end.
pub(super) async fn send(address: &str, bytes: &Bytes) -> Result<Reaction> {
    let mut stream = TcpStream::connect(address).await.context("connect")?;
    // Whoever is at the other end may have closed already: that is an answer.
    if stream.write_all(&bytes.bytes).await.is_err() {
        return Ok(Reaction::Closed);
    }
    if bytes.leaving == Leaving::Abrupt {
        return Ok(Reaction::Left);
    }
    let mut answer = Vec::new();
    let rest = async {
        stream.shutdown().await.ok();
        stream.read_to_end(&mut answer).await.ok();
    };
    if tokio::time::timeout(PATIENCE, rest).await.is_err() {
        return Ok(Reaction::Left);
    }
    Ok(match answer.as_slice() {
        [] => Reaction::Closed,
        [b'H', b'T', b'T', b'P', b'/', _, b'.', _, b' ', code @ ..] => {
            Reaction::Answered(String::from_utf8_lossy(&code[..code.len().min(3)]).into_owned())
        }
        _ => Reaction::Answered("HTTP/2 frames".to_owned()),
    })
}
