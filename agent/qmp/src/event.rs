//! What QEMU reports without being asked.
//!
//! An [`Event`] is kept as it came: name, data, time. Only who wants to know
//! more asks for its [`EventView`], so an event of a newer QEMU, or one whose
//! data changed its shape, costs nothing and breaks nothing.

use serde_json::{Map, Value};

use crate::migration::MigrationStatus;

/// One event, as it came.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// QEMU's name for it, such as `MIGRATION`.
    pub name: String,
    /// Its data; `null` if it has none.
    pub data: Value,
    /// When it happened by the host's clock, in microseconds since 1970.
    /// `None` if QEMU could not read its clock (it says -1 then).
    pub at_us: Option<u64>,
}

impl Event {
    pub(crate) fn from_wire(name: String, object: &mut Map<String, Value>) -> Self {
        let data = object.remove("data").unwrap_or(Value::Null);
        let part = |key| {
            let value = object.get("timestamp")?.get(key)?.as_i64()?;
            u64::try_from(value).ok()
        };
        let at_us = || {
            let seconds_us = part("seconds")?.checked_mul(1_000_000)?;
            seconds_us.checked_add(part("microseconds")?)
        };
        let at_us = at_us();
        Self { name, data, at_us }
    }

    /// Returns the event typed, or [`EventView::Other`].
    #[must_use]
    pub fn view(&self) -> EventView<'_> {
        self.known().unwrap_or(EventView::Other)
    }

    fn known(&self) -> Option<EventView<'_>> {
        let view = match self.name.as_str() {
            "MIGRATION" => EventView::Migration(MigrationStatus::from(self.text("status")?)),
            "MIGRATION_PASS" => EventView::MigrationPass(self.number("pass")?),
            "STOP" => EventView::Stop,
            "RESUME" => EventView::Resume,
            "SHUTDOWN" => EventView::Shutdown {
                origin: if self.flag("guest")? { Origin::Guest } else { Origin::Host },
                reason: self.text("reason").unwrap_or_default(),
            },
            "RESET" => EventView::Reset,
            "POWERDOWN" => EventView::Powerdown,
            "SUSPEND" => EventView::Suspend,
            "WAKEUP" => EventView::Wakeup,
            "GUEST_PANICKED" => EventView::GuestPanicked,
            "JOB_STATUS_CHANGE" => {
                EventView::JobStatus { id: self.text("id")?, status: self.text("status")? }
            }
            "BLOCK_JOB_READY" => EventView::BlockJobReady { job: self.text("device")? },
            "BLOCK_JOB_COMPLETED" => EventView::BlockJobCompleted {
                job: self.text("device")?,
                error: self.text("error"),
            },
            "BLOCK_JOB_CANCELLED" => EventView::BlockJobCancelled { job: self.text("device")? },
            "BLOCK_JOB_ERROR" => EventView::BlockJobError { job: self.text("device")? },
            "BLOCK_EXPORT_DELETED" => EventView::BlockExportDeleted { id: self.text("id")? },
            "BLOCK_IO_ERROR" => EventView::BlockIoError {
                node: self.text("node-name").unwrap_or_default(),
                reason: self.text("reason").unwrap_or_default(),
            },
            "BALLOON_CHANGE" => EventView::BalloonChange { actual_bytes: self.number("actual")? },
            "DEVICE_DELETED" => EventView::DeviceDeleted { device: self.text("device") },
            "UNPLUG_PRIMARY" => EventView::UnplugPrimary { device: self.text("device-id")? },
            _ => return None,
        };
        Some(view)
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.data.get(key)?.as_str()
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.data.get(key)?.as_u64()
    }

    fn flag(&self, key: &str) -> Option<bool> {
        self.data.get(key)?.as_bool()
    }
}

/// Who asked for a shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The guest powered itself off.
    Guest,
    /// Somebody outside: a signal or a command.
    Host,
}

/// An event's typed view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventView<'a> {
    /// The migration changed its status. Sent only with the capability `events`.
    Migration(MigrationStatus),
    /// The migration begins its n-th pass over the memory.
    MigrationPass(u64),
    /// The vCPUs stopped.
    Stop,
    /// The vCPUs run.
    Resume,
    /// The guest shuts down.
    Shutdown {
        /// Who asked for it.
        origin: Origin,
        /// QEMU's word, such as `guest-shutdown` or `host-qmp-quit`.
        reason: &'a str,
    },
    /// The guest was reset.
    Reset,
    /// The guest was asked to power off.
    Powerdown,
    /// The guest went to sleep.
    Suspend,
    /// The guest woke up.
    Wakeup,
    /// The guest's kernel panicked.
    GuestPanicked,
    /// A job changed its status.
    JobStatus {
        /// The job.
        id: &'a str,
        /// QEMU's word for the new status.
        status: &'a str,
    },
    /// A mirror has caught up.
    BlockJobReady {
        /// The job.
        job: &'a str,
    },
    /// A block job ended, well or not.
    BlockJobCompleted {
        /// The job.
        job: &'a str,
        /// Why it failed; `None` if it did not.
        error: Option<&'a str>,
    },
    /// A block job was cancelled; a ready mirror ends so when it is let go.
    BlockJobCancelled {
        /// The job.
        job: &'a str,
    },
    /// A block job met an I/O error.
    BlockJobError {
        /// The job.
        job: &'a str,
    },
    /// A block export is gone.
    BlockExportDeleted {
        /// The export.
        id: &'a str,
    },
    /// The guest's disk I/O failed.
    BlockIoError {
        /// The block node.
        node: &'a str,
        /// The operating system's text.
        reason: &'a str,
    },
    /// The guest's memory allowance changed.
    BalloonChange {
        /// What the guest may use now, in bytes.
        actual_bytes: u64,
    },
    /// A device was unplugged.
    DeviceDeleted {
        /// Its id, if it had one.
        device: Option<&'a str>,
    },
    /// A failover pair loses its primary for the migration.
    UnplugPrimary {
        /// The device.
        device: &'a str,
    },
    /// Anything else; see [`Event::name`] and [`Event::data`].
    Other,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(value: Value) -> Event {
        let Value::Object(mut object) = value else { panic!("not an object") };
        let name = object.get("event").and_then(Value::as_str).unwrap().to_owned();
        Event::from_wire(name, &mut object)
    }

    #[test]
    fn a_failed_clock_is_no_time() {
        let broken = json!({"event": "STOP", "timestamp": {"seconds": -1, "microseconds": -1}});
        assert_eq!(event(broken).at_us, None);
        let fine = json!({"event": "STOP", "timestamp": {"seconds": 2, "microseconds": 5}});
        assert_eq!(event(fine).at_us, Some(2_000_005));
    }

    #[test]
    fn a_status_of_a_newer_qemu_is_carried() {
        let event = event(json!({"event": "MIGRATION", "data": {"status": "postcopy-device"}}));
        let status = MigrationStatus::Unknown("postcopy-device".to_owned());
        assert_eq!(event.view(), EventView::Migration(status));
    }

    #[test]
    fn known_names_with_odd_data_are_other() {
        assert_eq!(event(json!({"event": "MIGRATION", "data": 4})).view(), EventView::Other);
        assert_eq!(event(json!({"event": "SHUTDOWN"})).view(), EventView::Other);
    }
}
