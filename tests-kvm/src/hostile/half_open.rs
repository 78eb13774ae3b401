//! Connections that begin and do not go on.

use std::fs;

use anyhow::{Context as _, Result, bail};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use super::{Port, Prey};

/// Connections that are held open. Dropping them ends them.
#[derive(Debug)]
pub struct HalfOpen(Vec<TcpStream>);

impl HalfOpen {
    /// Opens so many connections to each port; each says a little, or nothing.
    ///
    /// # Errors
    ///
    /// Fails if one is not taken.
    pub async fn open(prey: &Prey, each: usize) -> Result<Self> {
        const BEGINNINGS: [&[u8]; 5] = [
            b"",
            b"GET /api/vms HTTP/1.1\r\nHost:",
            b"POST /api/migrations HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
            b"PRI * HTTP/2.0\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
        ];
        let mut held = Vec::new();
        for port in Port::ALL {
            let address = prey.address(port);
            for beginning in BEGINNINGS.iter().cycle().take(each) {
                let mut stream = TcpStream::connect(&address)
                    .await
                    .with_context(|| format!("connect to {}", port.label()))?;
                stream.write_all(beginning).await.context("begin")?;
                held.push(stream);
            }
        }
        Ok(Self(held))
    }

    /// Fails unless the kernel asks each of these peers, now and then, whether it is still there: one
    /// that lost its power never says that it goes.
    ///
    /// # Errors
    ///
    /// Fails with how many it does not ask.
    pub fn expect_asked_after(&self, pid: i32, port: Port) -> Result<()> {
        let path = format!("/proc/{pid}/net/tcp");
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let (open, asked) = kept_alive(&text, port.number());
        if open == 0 || asked < open {
            bail!("{}: {asked} of {open} connections are kept alive", port.label());
        }
        Ok(())
    }

    /// Returns how many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

/// Counts the connections that came to a port, and those of them that have a timer: to ask again,
/// or to send again what was not acknowledged yet.
fn kept_alive(text: &str, port: u16) -> (usize, usize) {
    const ESTABLISHED: &str = "01";
    const NO_TIMER: &str = "00:";
    let ours = format!(":{port:04X}");
    let timers: Vec<bool> = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| fields.get(1).is_some_and(|local| local.ends_with(&ours)))
        .filter(|fields| fields.get(3) == Some(&ESTABLISHED))
        .filter_map(|fields| Some(!fields.get(5)?.starts_with(NO_TIMER)))
        .collect();
    (timers.len(), timers.iter().filter(|kept| **kept).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_alive_connections_are_told_from_others() {
        let text = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when\n\
                    0: 644D000A:2387 0A4D000A:0001 01 00000000:00000000 02:00000AAA 00000000\n\
                    1: 644D000A:2387 0A4D000A:0002 01 00000000:00000000 00:00000000 00000000\n\
                    2: 644D000A:2387 0A4D000A:0003 06 00000000:00000000 03:00000000 00000000\n\
                    3: 644D000A:2388 0A4D000A:0004 01 00000000:00000000 02:00000000 00000000\n";
        assert_eq!(kept_alive(text, 0x2387), (2, 1));
    }
}
