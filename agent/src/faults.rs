//! Named points at which a test holds or kills the agent.
//!
//! A point does nothing unless the feature `fault-points` is compiled in and its directory is
//! configured. `NAME.hold` makes the agent write `NAME.reached` and wait until the hold is gone;
//! `NAME.kill` ends it on the spot, as a power cut would.

#[cfg(feature = "fault-points")]
use std::path::PathBuf;

/// The actions that have points. The crash matrix has to come to each of them.
#[cfg(feature = "fault-points")]
const ACTIONS: &str = include_str!("faults.txt");

/// The points of one agent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    #[cfg(feature = "fault-points")]
    dir: Option<PathBuf>,
}

#[cfg(feature = "fault-points")]
impl Faults {
    pub(crate) fn new(config: &crate::config::Config) -> Self {
        Self { dir: config.fault_points.clone() }
    }

    /// Passes the point `moment.action`.
    pub(crate) async fn at(&self, moment: &str, action: &str) {
        use std::time::Duration;
        let Some(dir) = &self.dir else { return };
        assert!(ACTIONS.lines().any(|known| known == action), "{action} is not in faults.txt");
        let point = dir.join(format!("{moment}.{action}"));
        let file = |ending: &str| point.with_file_name(format!("{moment}.{action}.{ending}"));
        if file("kill").exists() {
            // SIGKILL, so that nothing is put in order.
            let own = nix::unistd::Pid::this();
            let killed = nix::sys::signal::kill(own, nix::sys::signal::Signal::SIGKILL);
            tracing::error!(?killed, "still alive after killing myself");
        }
        if file("hold").exists() {
            if let Err(error) = std::fs::write(file("reached"), b"") {
                tracing::error!(%error, "cannot tell that a fault point was reached");
            }
            while file("hold").exists() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
}

#[cfg(not(feature = "fault-points"))]
impl Faults {
    pub(crate) fn new(_config: &crate::config::Config) -> Self {
        Self::default()
    }

    /// Passes a point: nothing.
    #[expect(clippy::unused_async, reason = "a test build waits here")]
    pub(crate) async fn at(&self, _moment: &str, _action: &str) {}
}

#[cfg(all(test, feature = "fault-points"))]
mod tests {
    use vmferry_proto::v1::execute_request::Action;

    use super::*;
    use crate::actions::label;

    #[test]
    fn each_action_has_points() {
        let all = [
            Action::ArmReceiver(Default::default()),
            Action::CancelTransfer(Default::default()),
            Action::ContinueDestination(Default::default()),
            Action::DestroyReceiver(Default::default()),
            Action::ForgetVm(Default::default()),
            Action::HoldGuest(Default::default()),
            Action::KillSource(Default::default()),
            Action::OrderSwitchover(Default::default()),
            Action::RecoverReceiver(Default::default()),
            Action::ReleaseSource(Default::default()),
            Action::ResumeSource(Default::default()),
            Action::ResumeTransfer(Default::default()),
            Action::SetLimits(Default::default()),
            Action::ShutDownGuest(Default::default()),
            Action::StartPostcopy(Default::default()),
            Action::StartReceiver(Default::default()),
            Action::StartTransfer(Default::default()),
            Action::StartVm(Default::default()),
            Action::StopVm(Default::default()),
        ];
        assert!(all.iter().map(label).eq(ACTIONS.lines()));
    }
}
