//! An agent's side of the one call over which it reports.
//!
//! A call of its own for each report would cost the planner more than what is in the report: it
//! hears thousands of hosts.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};

use crate::v1::ReportReply;

/// A call that is open, over which `M`, the report or its encoding, is sent.
#[derive(Debug)]
pub struct Reporting<M> {
    reports: mpsc::Sender<M>,
    replies: Streaming<ReportReply>,
    deadline: Duration,
}

impl<M: Send + 'static> Reporting<M> {
    /// Begins a call; each answer in it has to come within `deadline`.
    ///
    /// # Errors
    ///
    /// Fails if the planner cannot be reached or does not take reports from this caller.
    pub async fn open<F>(
        deadline: Duration,
        call: impl FnOnce(ReceiverStream<M>) -> F,
    ) -> Result<Self, Status>
    where
        F: Future<Output = Result<Response<Streaming<ReportReply>>, Status>>,
    {
        let (reports, sent) = mpsc::channel(1);
        let replies = within(deadline, call(ReceiverStream::new(sent))).await??.into_inner();
        Ok(Self { reports, replies, deadline })
    }

    /// Sends a report and waits for what the planner makes of it.
    ///
    /// # Errors
    ///
    /// Fails if there is no answer within the deadline, or the planner ended the call. The call is
    /// of no more use then: an answer that comes late would be taken for that to the next report.
    pub async fn send(mut self, report: M) -> Result<(ReportReply, Self), Status> {
        if self.reports.send(report).await.is_err() {
            // Why is what the planner said last.
            return Err(self.end().await);
        }
        match within(self.deadline, self.replies.message()).await?? {
            Some(reply) => Ok((reply, self)),
            None => Err(ended()),
        }
    }

    async fn end(mut self) -> Status {
        match within(self.deadline, self.replies.message()).await {
            Ok(Err(status)) | Err(status) => status,
            Ok(Ok(_)) => ended(),
        }
    }
}

fn ended() -> Status {
    Status::unavailable("the planner ended the call over which this host reports")
}

async fn within<T>(deadline: Duration, work: impl Future<Output = T>) -> Result<T, Status> {
    timeout(deadline, work).await.map_err(|_elapsed| {
        Status::deadline_exceeded(format!("the planner did not answer within {deadline:?}"))
    })
}
