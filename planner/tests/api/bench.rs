//! A planner over a world, and how a test talks to it.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::Channel;
use vmferry_planner::agents::rpc::Directory;
use vmferry_planner::config::{Config, StoreUrl};
use vmferry_planner::faults::FaultPoints;
use vmferry_planner::inventory::Inventory;
use vmferry_planner::planner::{Parts, Planner};
use vmferry_planner::server;
use vmferry_planner::shutdown::Shutdown;
use vmferry_planner::store::sql::SqlStore;
use vmferry_planner::store::{Sharing, Store};
use vmferry_proto::v1;
use vmferry_proto::v1::planner_client::PlannerClient;
use vmferry_tls::{Acceptor, Protocol, Security};

use crate::world::World;

/// Nothing here takes a second; a test that waits longer hangs.
const BOUND: Duration = Duration::from_secs(20);

/// One planner in this process, which can be ended and started again on the same store.
pub(crate) struct Bench {
    pub(crate) planner: Arc<Planner>,
    pub(crate) world: World,
    pub(crate) rest: SocketAddr,
    grpc: SocketAddr,
    /// Those that have reported.
    pub(crate) hosts: Vec<String>,
    url: StoreUrl,
    dir: TempDir,
}

/// A VM definition that every fake host can run.
pub(crate) fn definition(name: &str, of: u128) -> String {
    format!(
        "name = \"{name}\"\nuuid = \"{}\"\nmachine = \"q35\"\nmemory = \"896MiB\"\n",
        vmferry_types::VmId::from_u128(of)
    )
}

/// Where REST and gRPC are.
type Edges = (SocketAddr, SocketAddr);

async fn planner(dir: &Path, url: &StoreUrl, world: &World) -> (Arc<Planner>, Edges) {
    // A planner that shares its store is taken over from soon.
    let lease = match url {
        StoreUrl::Sqlite(_) => "10s",
        StoreUrl::Postgres(_) => "1s",
    };
    let text = format!(
        "state_dir = \"{}\"\n[listen]\ngrpc = \"127.0.0.1:0\"\nrest = \"127.0.0.1:0\"\n\
         [policy]\nqueue_retry = \"1s\"\nlease = \"{lease}\"\n\
         [migration]\nstall_limit = \"3s\"\n\
         [fence]\ncommand = [\"/bin/sh\", \"-c\", \"test -e {}/power-is-off && echo off: $0\", \"{{host}}\"]\n\
         [security]\nplain_text = \"loopback\"\n",
        dir.display(),
        dir.display()
    );
    let path = dir.join("planner.toml");
    std::fs::write(&path, text).unwrap();
    let config = Config::load(&path).unwrap();
    let store = SqlStore::open(url).await.unwrap();
    if store.sharing() == Sharing::Alone {
        store.clear_leases().await.unwrap();
    }
    let store: Arc<dyn Store> = Arc::new(store);
    let directory = Arc::new(Directory::default());
    let inventory = Inventory::load(&config, directory, store.as_ref()).await.unwrap();
    let planner = Planner::new(Parts {
        config,
        store,
        agents: Arc::new(world.clone()),
        inventory,
        // Holds nobody unless a test puts a file there.
        faults: FaultPoints::new(Some(dir.to_path_buf())),
        shutdown: Shutdown::default(),
    });
    let grpc = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let rest = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let edges = (rest.local_addr().unwrap(), grpc.local_addr().unwrap());
    let grpc = Acceptor::new(grpc, Security::PlainText, Protocol::Grpc);
    let rest = Acceptor::new(rest, Security::PlainText, Protocol::Http);
    server::serve(&planner, grpc, rest);
    (planner, edges)
}

impl Bench {
    /// Starts a planner over a world whose hosts have reported.
    pub(crate) async fn new(hosts: &[&str]) -> Self {
        let dir = TempDir::new().unwrap();
        let url = StoreUrl::Sqlite(dir.path().join("planner.db"));
        Self::over(World::new(hosts), url, dir, hosts).await
    }

    /// Starts another planner over the same world, on a database that several share.
    pub(crate) async fn sharing(world: &World, database: &StoreUrl, hosts: &[&str]) -> Self {
        Self::over(world.clone(), database.clone(), TempDir::new().unwrap(), hosts).await
    }

    async fn over(world: World, url: StoreUrl, dir: TempDir, hosts: &[&str]) -> Self {
        let (planner, (rest, grpc)) = planner(dir.path(), &url, &world).await;
        let named = hosts.iter().map(|host| (*host).to_owned()).collect();
        let bench = Self { planner, world, rest, grpc, hosts: named, url, dir };
        bench.report(hosts).await;
        bench
    }

    /// Starts a planner on an empty store over a world that is there already.
    pub(crate) async fn fresh(world: &World, hosts: &[&str]) -> Self {
        let dir = TempDir::new().unwrap();
        let url = StoreUrl::Sqlite(dir.path().join("planner.db"));
        Self::over(world.clone(), url, dir, hosts).await
    }

    /// Returns the folder in which a test holds the planner at its points.
    #[cfg(feature = "fault-points")]
    pub(crate) fn points(&self) -> &Path {
        self.dir.path()
    }

    /// Lets the fence command find that the power is off.
    pub(crate) fn power_is_off(&self) {
        std::fs::write(self.dir.path().join("power-is-off"), "").unwrap();
    }

    /// Ends the planner wherever it is, as a crash does.
    pub(crate) async fn dies(self) {
        self.planner.parts.shutdown.finish().await;
    }

    /// Ends the planner as it is told to by a signal.
    pub(crate) async fn leaves(self) {
        self.planner.leave().await;
    }

    /// Ends the planner wherever it is, as a crash does, and starts another on the same store.
    pub(crate) async fn restart(self) -> Self {
        let Self { planner: old, world, hosts, url, dir, .. } = self;
        old.parts.shutdown.finish().await;
        // The lock on the file is let go with the last handle to the store.
        let weak = Arc::downgrade(&old);
        drop(old);
        until(|| weak.strong_count() == 0).await;
        let (planner, (rest, grpc)) = planner(dir.path(), &url, &world).await;
        Self { planner, world, rest, grpc, hosts, url, dir }
    }

    pub(crate) async fn report(&self, hosts: &[&str]) {
        for host in hosts {
            let reply = self.planner.report(self.world.report(host)).await.unwrap();
            assert_eq!(reply.refused, "");
        }
    }

    /// Starts a VM on a host and waits until it runs.
    pub(crate) async fn start(&self, name: &str, of: u128, host: &str) -> v1::Vm {
        let asked = v1::StartVmRequest {
            definition: definition(name, of),
            host: host.to_owned(),
            wait_ms: 10_000,
            ..v1::StartVmRequest::default()
        };
        let vm = self.planner.start_vm(asked).await.unwrap();
        assert_eq!(vm.power, "running");
        vm
    }

    pub(crate) async fn migrate(&self, vm: &str, target: &str) -> v1::Migration {
        let asked = v1::MigrateVmRequest {
            vm_name: vm.to_owned(),
            target_host: target.to_owned(),
            ..v1::MigrateVmRequest::default()
        };
        self.planner.migrate_vm(asked).await.unwrap()
    }

    /// Waits until a migration is as wanted.
    pub(crate) async fn see(
        &self,
        id: &str,
        wanted: impl Fn(&v1::Migration) -> bool,
    ) -> v1::Migration {
        let mut bell = self.planner.live.subscribe(id.parse().unwrap());
        let looking = async {
            loop {
                let migration = self.planner.get_migration(id).await.unwrap();
                if wanted(&migration) {
                    return migration;
                }
                // The bell rings for each change; the time is for what only time changes.
                let _rang = tokio::time::timeout(Duration::from_millis(50), bell.changed()).await;
            }
        };
        match tokio::time::timeout(BOUND, looking).await {
            Ok(migration) => migration,
            Err(_) => panic!("{:#?}", self.planner.get_migration(id).await),
        }
    }

    pub(crate) async fn ended(&self, id: &str) -> v1::Migration {
        self.see(id, |migration| !migration.completed.is_empty()).await
    }

    /// Calls the planner as the command line does.
    pub(crate) async fn grpc(&self) -> PlannerClient<Channel> {
        PlannerClient::connect(format!("http://{}", self.grpc)).await.unwrap()
    }

    /// Sends a request as a stranger would, byte by byte.
    pub(crate) async fn http(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut stream = TcpStream::connect(self.rest).await.unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        // A server that refuses early may stop reading.
        let _sent = stream.write_all(request.as_bytes()).await;
        let mut answer = Vec::new();
        let _read = stream.read_to_end(&mut answer).await;
        let text = String::from_utf8_lossy(&answer);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        (status, serde_json::from_str(body).unwrap_or_else(|_| Value::String(body.to_owned())))
    }
}

/// Waits until a look finds what it looks for.
pub(crate) async fn found<T>(look: impl AsyncFn() -> Option<T>) -> T {
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    let looking = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            ticks.tick().await;
        }
    };
    tokio::time::timeout(BOUND, looking).await.expect("it never became so")
}

/// Waits until something is so.
pub(crate) async fn until(so: impl Fn() -> bool) {
    let mut ticks = tokio::time::interval(Duration::from_millis(2));
    let waiting = async {
        while !so() {
            ticks.tick().await;
        }
    };
    assert!(tokio::time::timeout(BOUND, waiting).await.is_ok(), "it never became so");
}
