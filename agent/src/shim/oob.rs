//! Keeps the second monitor.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use vmferry_qmp::EventView;

use super::log::note;
use super::protocol::{Failure, MigrationSeen};
use super::state::{Oob, State};
use crate::clock::monotonic_us;
use crate::monitor::{Heard, Monitor, MonitorError};

/// How often the socket is tried while QEMU most likely is about to bind it,
/// some 50 ms after exec: the guest must not begin to move without a way in.
const RETRY_FAST: Duration = Duration::from_millis(2);

/// How long that is.
const FAST_FOR: Duration = Duration::from_secs(2);

/// How often it is tried later, when QEMU allocates a large guest's memory or
/// the connection broke.
const RETRY: Duration = Duration::from_millis(200);

/// How long a connection that was accepted waits for its greeting.
const GREETING_DEADLINE: Duration = Duration::from_secs(60);

/// Connects to the second monitor, keeps it, and connects again if it breaks.
///
/// Never returns; the owner ends it with the shim.
pub(super) async fn keep(state: &State) {
    let path = state.dir.oob_socket();
    let begun = Instant::now();
    loop {
        match Monitor::connect(&path, GREETING_DEADLINE).await {
            Ok(monitor) => {
                if !monitor.oob() {
                    note(&state.dir, "this QEMU offers no out-of-band execution");
                }
                let mut events = monitor.events();
                state.oob.send_replace(Oob::Connected(monitor.clone()));
                while let Some(heard) = events.next().await {
                    hear(state, &heard);
                }
                let reason = monitor.closed().await.to_string();
                state.oob.send_replace(Oob::Disconnected { reason });
            }
            Err(error) => {
                state.oob.send_replace(Oob::Disconnected { reason: error.to_string() });
            }
        }
        let fast = Instant::now().duration_since(begun) < FAST_FOR;
        sleep(if fast { RETRY_FAST } else { RETRY }).await;
    }
}

fn hear(state: &State, heard: &Heard) {
    match heard {
        Heard::Event(event) => {
            let view = event.view();
            // On the disk at once: nobody else may be there to tell it.
            if let Some(guest) = state.hear_guest(|guest| guest.hear(&view, monotonic_us()))
                && let Err(error) = state.dir.write_guest(&guest)
            {
                note(&state.dir, &format!("cannot record what the guest did: {error}"));
            }
            if let EventView::Migration(status) = view {
                state.saw_migration(MigrationSeen { at_us: event.at_us, status });
            }
        }
        Heard::Lagged(lost) => note(&state.dir, &format!("{lost} events were lost")),
    }
}

/// Executes one command out of band.
pub(super) async fn execute(
    state: &State,
    command: &str,
    arguments: serde_json::Value,
    deadline: Duration,
) -> Result<serde_json::Value, Failure> {
    let oob = state.oob.borrow().clone();
    let monitor = match oob {
        Oob::Connected(monitor) => monitor,
        Oob::Disconnected { reason } => return Err(Failure::Disconnected { reason }),
    };
    monitor.execute_raw_oob(command, arguments, deadline).await.map_err(|error| match error {
        MonitorError::Refused { source, .. } => {
            Failure::Refused { class: source.class, description: source.description }
        }
        MonitorError::Silent { waited, .. } => {
            Failure::Silent { waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX) }
        }
        MonitorError::OutOfBandNotOffered { command } => Failure::NotOutOfBand { command },
        MonitorError::Closed { source, .. } => Failure::Disconnected { reason: source.to_string() },
        MonitorError::Connect { .. }
        | MonitorError::NotGreeted { .. }
        | MonitorError::Decode { .. }
        | MonitorError::Encode { .. } => {
            Failure::System { operation: format!("execute `{command}`"), reason: error.to_string() }
        }
    })
}
