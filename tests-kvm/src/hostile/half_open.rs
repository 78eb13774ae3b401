//! Connections that begin and do not go on.

use anyhow::{Context as _, Result};
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

    /// Returns how many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }
}
