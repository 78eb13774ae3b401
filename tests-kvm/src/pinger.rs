//! Pinging a guest from the client's namespace throughout a move.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, recv, sendto, socket,
};

use crate::lab::Lab;
use crate::serial::now_us;

/// How often it pings.
pub const PERIOD_US: u64 = 20_000;

/// Marks our echo requests.
const IDENTIFIER: u16 = 0x7666;

/// What came of the pings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// How many were sent.
    pub sent: usize,
    /// How many were not answered.
    pub lost: usize,
    /// The longest time between two answers.
    pub longest_gap_us: u64,
}

/// A thread that pings one address.
#[derive(Debug)]
pub struct Pinger {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Echo>>>,
}

#[derive(Clone, Copy, Debug)]
struct Echo {
    sent_us: u64,
    answered_us: Option<u64>,
}

impl Pinger {
    /// Starts to ping `target` from the client's namespace.
    ///
    /// # Errors
    ///
    /// Fails if no raw socket can be had there.
    pub fn start(lab: &Lab, target: Ipv4Addr) -> Result<Self> {
        // A thread may live in another namespace than its process, so the socket is made in one.
        let client = std::thread::scope(|scope| {
            scope
                .spawn(|| -> Result<OwnedFd> {
                    lab.enter("cl")?;
                    socket(
                        AddressFamily::Inet,
                        SockType::Raw,
                        SockFlag::SOCK_CLOEXEC,
                        SockProtocol::Icmp,
                    )
                    .context("open a raw socket")
                })
                .join()
        });
        let Ok(client) = client else { bail!("the thread that opens the raw socket panicked") };
        let client = client?;
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::Builder::new()
            .name("pinger".to_owned())
            .spawn({
                let stop = Arc::clone(&stop);
                move || run(&client, target, &stop)
            })
            .context("start the pinger")?;
        Ok(Self { stop, thread })
    }

    /// Stops and says what came of it. Pings of the last half second count only if answered.
    ///
    /// # Errors
    ///
    /// Fails if the socket did.
    pub fn finish(self) -> Result<Loss> {
        self.stop.store(true, Ordering::Relaxed);
        let Ok(echoes) = self.thread.join() else { bail!("the pinger panicked") };
        Ok(loss(&echoes?))
    }
}

fn loss(echoes: &[Echo]) -> Loss {
    let first = echoes.iter().position(|echo| echo.answered_us.is_some()).unwrap_or(echoes.len());
    let last =
        echoes.iter().rposition(|echo| echo.answered_us.is_some()).map_or(first, |at| at + 1);
    let counted = &echoes[first..last];
    let answers: Vec<u64> = counted.iter().filter_map(|echo| echo.answered_us).collect();
    let gaps = answers.windows(2).filter_map(|pair| match pair {
        [before, after] => Some(after.saturating_sub(*before)),
        _ => None,
    });
    Loss {
        sent: counted.len(),
        lost: counted.iter().filter(|echo| echo.answered_us.is_none()).count(),
        longest_gap_us: gaps.max().unwrap_or_default(),
    }
}

fn run(client: &OwnedFd, target: Ipv4Addr, stop: &AtomicBool) -> Result<Vec<Echo>> {
    let address = SockaddrIn::from(std::net::SocketAddrV4::new(target, 0));
    let mut echoes: Vec<Echo> = Vec::new();
    let mut next_us = now_us();
    while !stop.load(Ordering::Relaxed) {
        let now = now_us();
        if now >= next_us {
            let sequence = u16::try_from(echoes.len() & 0xffff).unwrap_or_default();
            // A send may be refused while the neighbour is unknown: that ping is lost.
            sendto(client.as_raw_fd(), &request(sequence), &address, MsgFlags::empty()).ok();
            echoes.push(Echo { sent_us: now, answered_us: None });
            next_us = now + PERIOD_US;
        }
        let wait_ms = u16::try_from(next_us.saturating_sub(now_us()) / 1000).unwrap_or_default();
        let mut polled = [PollFd::new(client.as_fd(), PollFlags::POLLIN)];
        if poll(&mut polled, PollTimeout::from(wait_ms)).unwrap_or_default() > 0 {
            receive(client, target, &mut echoes)?;
        }
    }
    Ok(echoes)
}

fn receive(client: &OwnedFd, target: Ipv4Addr, echoes: &mut [Echo]) -> Result<()> {
    let mut buffer = [0u8; 256];
    let length =
        recv(client.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT).context("receive a ping")?;
    let Some(sequence) = answer(&buffer[..length], target) else { return Ok(()) };
    // The latest ping with this sequence number is the one that was answered.
    let newest = echoes.len().checked_sub(1);
    let at = newest.map(|newest| {
        newest - ((newest & 0xffff).wrapping_sub(usize::from(sequence)) & 0xffff).min(newest)
    });
    if let Some(echo) = at.and_then(|at| echoes.get_mut(at))
        && echo.answered_us.is_none()
        && now_us() >= echo.sent_us
    {
        echo.answered_us = Some(now_us());
    }
    Ok(())
}

/// Returns the sequence number of an answer to one of our pings.
fn answer(packet: &[u8], from: Ipv4Addr) -> Option<u16> {
    let header = usize::from(packet.first()? & 15) * 4;
    let sender: [u8; 4] = packet.get(12..16)?.try_into().ok()?;
    let echo = packet.get(header..header + 8)?;
    let identifier = u16::from_be_bytes([echo[4], echo[5]]);
    let ours = Ipv4Addr::from(sender) == from && echo[0] == 0 && identifier == IDENTIFIER;
    ours.then(|| u16::from_be_bytes([echo[6], echo[7]]))
}

fn request(sequence: u16) -> [u8; 8] {
    let [id_high, id_low] = IDENTIFIER.to_be_bytes();
    let [seq_high, seq_low] = sequence.to_be_bytes();
    let mut packet = [8, 0, 0, 0, id_high, id_low, seq_high, seq_low];
    let sum: u32 =
        packet.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !u16::try_from(folded & 0xffff).unwrap_or_default();
    packet[2..4].copy_from_slice(&checksum.to_be_bytes());
    packet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_a_request_is_right() {
        let packet = request(7);
        let sum: u32 = packet.chunks(2).map(|p| u32::from(u16::from_be_bytes([p[0], p[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    }

    #[test]
    fn loss_is_counted_between_the_first_and_the_last_answer() {
        let echo = |sent_us, answered_us| Echo { sent_us, answered_us };
        let seen = loss(&[
            echo(0, None),
            echo(20, Some(21)),
            echo(40, None),
            echo(60, Some(61)),
            echo(80, None),
        ]);
        assert_eq!(seen, Loss { sent: 3, lost: 1, longest_gap_us: 40 });
    }
}
