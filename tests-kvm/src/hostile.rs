//! Requests that no honest program sends, and what becomes of whoever gets them.
//!
//! Each port is sent a thousand of them from a seeded generator: noise, broken
//! framing, messages that cannot be, and messages whose form is right and whose
//! values are not. Then the [`footprint`] of the process has to be what it was.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::stream::{self, StreamExt as _};

use self::dice::Dice;
use self::grpc::Call;
use self::raw::Bytes;

pub mod agent;
pub mod definition;
pub mod dice;
pub mod footprint;
pub mod grpc;
pub mod half_open;
pub mod http;
pub mod noise;
pub mod planner;
pub mod raw;

/// How many requests are under way at one port.
const AT_ONCE: usize = 16;

/// A port that takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// The planner's gRPC.
    PlannerGrpc,
    /// The planner's REST.
    PlannerRest,
    /// An agent's gRPC.
    AgentGrpc,
    /// An agent's metrics and health.
    AgentMetrics,
}

impl Port {
    /// Every port.
    pub const ALL: [Self; 4] =
        [Self::PlannerGrpc, Self::PlannerRest, Self::AgentGrpc, Self::AgentMetrics];

    /// Returns its name.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::PlannerGrpc => "planner gRPC",
            Self::PlannerRest => "planner REST",
            Self::AgentGrpc => "agent gRPC",
            Self::AgentMetrics => "agent metrics",
        }
    }

    /// Returns its number.
    #[must_use]
    pub const fn number(self) -> u16 {
        match self {
            Self::PlannerRest => 9095,
            Self::PlannerGrpc => 9096,
            Self::AgentGrpc => 9097,
            Self::AgentMetrics => 9098,
        }
    }
}

/// What hostile requests are about.
#[derive(Clone, Debug)]
pub struct Prey {
    /// Where planner and agent are: the first half of their addresses.
    pub planner: String,
    /// See `planner`.
    pub agent: String,
    /// The id of a VM that runs on that agent's host; no request may do anything to it.
    pub vm: String,
    /// Its name.
    pub name: String,
    /// The host it runs on.
    pub host: String,
    /// The id of a VM that is nowhere: commands for it are let through to what they command.
    pub nobody: String,
}

impl Prey {
    /// Returns where a port is.
    #[must_use]
    pub fn address(&self, port: Port) -> String {
        let host = match port {
            Port::PlannerGrpc | Port::PlannerRest => &self.planner,
            Port::AgentGrpc | Port::AgentMetrics => &self.agent,
        };
        format!("{host}:{}", port.number())
    }

    /// Returns the same with a VM that is none, for requests that may mean anything.
    fn without_vm(&self, dice: &mut Dice) -> Self {
        let nothing = "no-such-vm".to_owned();
        let nobody = dice.uuid().to_string();
        Self { vm: nothing.clone(), name: nothing, nobody, ..self.clone() }
    }
}

/// One hostile request.
#[derive(Clone, Debug)]
pub enum Request {
    /// Bytes on a connection of their own.
    Bytes(Bytes),
    /// HTTP that is well-formed, or nearly.
    Http(http::Exchange),
    /// A message over gRPC.
    Call(Call),
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reaction {
    /// An answer, under its code.
    Answered(String),
    /// The connection was closed without one.
    Closed,
    /// The sender had its fill of waiting and went.
    Left,
}

impl fmt::Display for Reaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered(code) => f.write_str(code),
            Self::Closed => f.write_str("closed"),
            Self::Left => f.write_str("left"),
        }
    }
}

/// How many requests had which reaction.
#[derive(Clone, Debug, Default)]
pub struct Tally(BTreeMap<Reaction, usize>);

impl Tally {
    /// Returns how many requests were counted.
    #[must_use]
    pub fn total(&self) -> usize {
        self.0.values().sum()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.total())?;
        for (reaction, count) in &self.0 {
            write!(f, ", {count} {reaction}")?;
        }
        Ok(())
    }
}

/// Makes the requests for one port.
#[must_use]
pub fn requests(port: Port, prey: &Prey, seed: u64, count: usize) -> Vec<Request> {
    let mut dice = Dice::new(seed ^ u64::from(port.number()));
    (0..count).map(|_| request(port, prey, &mut dice)).collect()
}

fn request(port: Port, prey: &Prey, dice: &mut Dice) -> Request {
    match (port, dice.below(10)) {
        (Port::PlannerGrpc | Port::AgentGrpc, 0..3) => Request::Bytes(raw::http2(dice)),
        (Port::PlannerGrpc | Port::AgentGrpc, 3) => Request::Bytes(raw::any(dice)),
        (Port::PlannerGrpc, _) => Request::Call(planner::call(prey, dice)),
        (Port::AgentGrpc, _) => Request::Call(agent::call(prey, dice)),
        (Port::PlannerRest | Port::AgentMetrics, 0) => Request::Bytes(raw::http2(dice)),
        (Port::PlannerRest | Port::AgentMetrics, 1..3) => Request::Bytes(raw::any(dice)),
        (Port::PlannerRest | Port::AgentMetrics, 3) => Request::Bytes(raw::http1(dice)),
        (Port::PlannerRest, _) => Request::Http(http::planner(prey, dice)),
        (Port::AgentMetrics, _) => Request::Http(http::metrics(dice)),
    }
}

/// Sends requests to a port and counts what becomes of them.
///
/// # Errors
///
/// Fails if the port does not take a connection, or if an answer to a well-formed request says
/// nothing that its sender could use.
pub async fn send(port: Port, prey: &Prey, requests: Vec<Request>) -> Result<Tally> {
    let address = prey.address(port);
    let channel = grpc::channel(&address)?;
    let mut reactions = stream::iter(requests)
        .map(|request| {
            let (address, channel) = (&address, &channel);
            async move {
                match &request {
                    Request::Bytes(bytes) => raw::send(address, bytes).await,
                    Request::Http(exchange) => http::send(address, exchange).await,
                    Request::Call(call) => grpc::send(channel, call).await,
                }
            }
        })
        .buffer_unordered(AT_ONCE);
    let mut tally = Tally::default();
    while let Some(reaction) = reactions.next().await {
        let reaction = reaction.with_context(|| format!("{} ({address})", port.label()))?;
        *tally.0.entry(reaction).or_default() += 1;
    }
    Ok(tally)
}

/// Fails unless an honest request to the port is answered at once.
///
/// # Errors
///
/// Fails if it is not.
pub async fn expect_answers(port: Port, prey: &Prey) -> Result<()> {
    /// Far more than an idle daemon takes, far less than anybody waits.
    const BOUND: Duration = Duration::from_secs(5);
    let address = prey.address(port);
    let answered = async {
        match port {
            Port::PlannerRest => http::get(&address, "/readyz").await.map(drop),
            Port::AgentMetrics => http::get(&address, "/healthz").await.map(drop),
            Port::PlannerGrpc => grpc::expect_ok(&address, "/vmferry.v1.Planner/ListVms").await,
            Port::AgentGrpc => grpc::expect_ok(&address, "/vmferry.v1.Agent/GetReport").await,
        }
    };
    match tokio::time::timeout(BOUND, answered).await {
        Ok(result) => result.with_context(|| format!("an honest request to {}", port.label())),
        Err(_) => bail!("{} did not answer an honest request within {BOUND:?}", port.label()),
    }
}
