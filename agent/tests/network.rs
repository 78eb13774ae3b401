//! A guest's tap in a network namespace of the test's own.

#![expect(clippy::unwrap_used, reason = "a test ends where something is not as it must be")]

use std::path::Path;
use std::process::Command;

use vmferry_agent::agent::{self, Agent};
use vmferry_agent::config::Config;
use vmferry_agent::process::{Launcher, LauncherKind};
use vmferry_agent::shutdown::Shutdown;
use vmferry_proto::v1;
use vmferry_proto::v1::agent_client::AgentClient;
use vmferry_proto::v1::execute_request::Action;

const VM: &str = "0f5f1d5e-7a52-4d7b-9d6c-3e1f0a9b8c7d";

fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn request(step: u64, action: Action) -> v1::ExecuteRequest {
    v1::ExecuteRequest {
        fence: Some(v1::Fence {
            vm_id: VM.to_owned(),
            migration_id: VM.to_owned(),
            generation: 1,
            claim: 1,
            step,
        }),
        action: Some(action),
    }
}

fn config(dir: &Path) -> Config {
    let path = dir.join("agent.toml");
    let text = format!(
        "host_id = 'a'\nstate_dir = '{0}/state'\nrun_dir = '{0}/run'\n\
         [listen]\ngrpc = '127.0.0.1:0'\nmetrics = '127.0.0.1:0'\n\
         [migration]\naddress = '127.0.0.1'\n[security]\nplain_text = 'loopback'\n",
        dir.display()
    );
    std::fs::write(&path, text).unwrap();
    Config::load(&path).unwrap()
}

async fn start_and_stop(dir: &Path) {
    let shutdown = Shutdown::default();
    let launcher = Launcher::new(LauncherKind::Detached, env!("CARGO_BIN_EXE_vmferry-agent"));
    let agent = Agent::start(config(dir), launcher, shutdown.clone()).await.unwrap();
    let address = agent::serve(&agent).await.unwrap();
    let mut client = AgentClient::connect(format!("http://{address}")).await.unwrap();
    let claim = v1::ClaimRequest {
        vm_id: VM.to_owned(),
        migration_id: VM.to_owned(),
        generation: 1,
        claim: 1,
        hold_limit_ms: 0,
    };
    client.claim(claim).await.unwrap();
    let nic = "[[nic]]\nmac = '52:54:00:00:00:01'\nbridge = 'br0'\nmtu = 1400\n";
    let definition = format!(
        "name = 'x'\nuuid = '{VM}'\nmachine = 'pc'\naccel = 'tcg'\nmemory = '64MiB'\n{nic}"
    );
    let start =
        |definition| Action::StartVm(v1::StartVm { definition, resolved_machine: String::new() });
    let missing = client.execute(request(1, start(definition.replace("br0", "br9")))).await;
    let detail: v1::ErrorDetail = prost::Message::decode(missing.unwrap_err().details()).unwrap();
    assert_eq!(detail.blockers[0].code, "missing_bridge");

    client.execute(request(2, start(definition))).await.unwrap();
    let links = ip("-o link show master br0");
    assert!(links.contains(" vf") && links.contains("mtu 1400") && links.contains("UP"), "{links}");
    let source = client.describe_source(v1::DescribeSourceRequest { vm_id: VM.to_owned() }).await;
    let source = source.unwrap().into_inner();
    assert_eq!(source.nics[0].mac, "52:54:00:00:00:01");
    assert!(source.devices[0].starts_with("virtio-net-pci nic0 addr="), "{:?}", source.devices);
    let report = client.get_report(v1::GetReportRequest {}).await.unwrap().into_inner();
    assert_eq!(report.capabilities.unwrap().bridges, ["br0"]);

    let quit = Action::StopVm(v1::StopVm { how: v1::StopHow::Quit.into(), deadline_ms: 0 });
    client.execute(request(3, quit)).await.unwrap();
    assert_eq!(ip("-o link show master br0"), "");
    shutdown.finish().await;
}

#[test]
fn a_guest_has_a_tap_on_its_bridge_while_it_runs() {
    // Before any thread is made: a namespace is a thread's own.
    if let Err(error) = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET) {
        eprintln!("left out: no network namespace can be made here: {error}");
        return;
    }
    ip("link set lo up");
    ip("link add br0 type bridge");
    ip("link set br0 up");
    let dir = tempfile::Builder::new().prefix("vf").tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(start_and_stop(dir.path()));
}
