//! One token that everything listens to, one tracker that everything is spawned on.

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::clock;

/// Ends the planner's tasks in order. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    token: CancellationToken,
    tracker: TaskTracker,
}

impl Shutdown {
    /// Runs a task until it ends or the planner does: at its next await, its future is dropped.
    ///
    /// Dropping is safe because whatever a task decided is committed before it acts, and each
    /// effect is given again by the next planner.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let token = self.token.clone();
        self.tracker.spawn(clock::inherit(async move {
            tokio::select! {
                biased;
                () = token.cancelled() => {}
                () = task => {}
            }
        }));
    }

    /// Completes when the planner is told to end.
    pub async fn requested(&self) {
        self.token.cancelled().await;
    }

    /// Tells every task to end and waits until all have.
    pub async fn finish(&self) {
        self.token.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }

    /// Tells every task to end.
    pub fn request(&self) {
        self.token.cancel();
    }
}
