//! A planner that takes reports and says what it was told to say.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures::stream::{BoxStream, StreamExt as _, TryStreamExt as _};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, StreamingService};
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};
use vmferry_proto::v1;

use crate::world::BOUND;

/// A planner without anything but the one call that agents make.
#[derive(Clone)]
pub(crate) struct Planner {
    pub(crate) address: SocketAddr,
    answer: Arc<Mutex<Result<v1::ReportReply, Status>>>,
    reports: watch::Sender<Vec<v1::HostReport>>,
    /// Serves for as long as anybody holds the planner.
    served: Arc<Mutex<JoinSet<()>>>,
}

impl Planner {
    pub(crate) async fn new() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let planner = Self {
            address: listener.local_addr().unwrap(),
            answer: Arc::new(Mutex::new(Ok(v1::ReportReply::default()))),
            reports: watch::Sender::new(Vec::new()),
            served: Arc::default(),
        };
        // The service itself must not hold what serves it.
        let service = Self { served: Arc::default(), ..planner.clone() };
        let server = tonic::transport::Server::builder().add_service(service);
        let serve = server.serve_with_incoming(TcpIncoming::from(listener));
        planner.served.lock().unwrap().spawn(async move { serve.await.unwrap() });
        planner
    }

    /// Says from now on who owns what.
    pub(crate) fn say(&self, generations: Vec<v1::VmGeneration>) {
        let refused = String::new();
        *self.answer.lock().unwrap() = Ok(v1::ReportReply { refused, generations });
    }

    /// Will not have anybody from now on.
    pub(crate) fn refuse(&self) {
        let refused = "not wanted".to_owned();
        *self.answer.lock().unwrap() = Ok(v1::ReportReply { refused, generations: Vec::new() });
    }

    /// Answers nobody from now on.
    pub(crate) fn fail(&self) {
        *self.answer.lock().unwrap() = Err(Status::unavailable("the planner is away"));
    }

    /// Waits for a report, of those that begin now, that satisfies `wanted`.
    pub(crate) async fn wait(
        &self,
        what: &str,
        wanted: impl Fn(&v1::HostReport) -> bool,
    ) -> v1::HostReport {
        let mut reports = self.reports.subscribe();
        let begun = reports.borrow_and_update().len();
        let found = tokio::time::timeout(BOUND, async {
            loop {
                let found = reports
                    .borrow_and_update()
                    .iter()
                    .skip(begun)
                    .find(|report| wanted(report))
                    .cloned();
                if let Some(report) = found {
                    return report;
                }
                reports.changed().await.unwrap();
            }
        });
        match found.await {
            Ok(report) => report,
            Err(_) => panic!("no report with {what}; the last: {:#?}", reports.borrow().last()),
        }
    }
}

impl NamedService for Planner {
    const NAME: &'static str = "vmferry.v1.Planner";
}

impl Service<http::Request<tonic::body::Body>> for Planner {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        assert_eq!(request.uri().path(), "/vmferry.v1.Planner/Report");
        let planner = self.clone();
        Box::pin(async move {
            let mut grpc = Grpc::new(tonic_prost::ProstCodec::default());
            Ok(grpc.streaming(planner, request).await)
        })
    }
}

impl StreamingService<v1::HostReport> for Planner {
    type Response = v1::ReportReply;
    type ResponseStream = BoxStream<'static, Result<v1::ReportReply, Status>>;
    type Future = BoxFuture<Response<Self::ResponseStream>, Status>;

    fn call(&mut self, request: Request<Streaming<v1::HostReport>>) -> Self::Future {
        let planner = self.clone();
        let replies = request.into_inner().and_then(move |report| {
            let answer = planner.answer.lock().unwrap().clone();
            planner.reports.send_modify(|reports| reports.push(report));
            std::future::ready(answer)
        });
        Box::pin(async move { Ok(Response::new(replies.boxed())) })
    }
}
