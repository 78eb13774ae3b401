//! The end of the agent, which is not the end of any guest.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How long tasks may take to put their things in order. A command that is cut off is resumed from
/// the journal, so little is lost if it is not enough.
const GRACE: Duration = Duration::from_secs(5);

/// Says when to end, and waits until all have.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    token: CancellationToken,
    tasks: TaskTracker,
}

impl Shutdown {
    /// Runs `task` until it ends or the agent does.
    pub fn spawn<F>(&self, task: F) -> tokio::task::JoinHandle<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let token = self.token.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = token.cancelled() => {}
                () = task => {}
            }
        })
    }

    /// Returns a token that is cancelled at the end.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }

    /// Says that it is over.
    pub fn begin(&self) {
        self.token.cancel();
    }

    /// Says that it is over and waits for the tasks, for a while.
    pub async fn finish(&self) {
        self.begin();
        self.tasks.close();
        if tokio::time::timeout(GRACE, self.tasks.wait()).await.is_err() {
            tracing::warn!(left = self.tasks.len(), "tasks did not end in time");
        }
    }
}
