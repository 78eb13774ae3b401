//! The machines of one run: hosts as network namespaces.
//!
//! ```text
//!              switch (the runner lives here)
//!    ┌─ bridge mgmt  10.77.0.0/24 ── planner, host a, host b, …
//!    └─ bridge guest 10.88.0.0/24 ── client, br0 of host a, br0 of host b, …
//! ```
//!
//! Nothing touches the network of the machine itself: all links are made inside
//! the namespaces. Their names carry the runner's process id, so that runs do not
//! meet and a later run can sweep what a killed one left.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The hosts that every run has. Three, so that a placement has a choice.
pub const HOSTS: [&str; 3] = ["a", "b", "c"];

/// The planners' addresses on the management network. Most cases have one.
pub const PLANNER_ADDRESSES: [&str; 2] = ["10.77.0.100", "10.77.0.101"];

/// The address of the planner, or of the first of two.
pub const PLANNER_ADDRESS: &str = PLANNER_ADDRESSES[0];

/// The client's address on the guests' network.
pub const CLIENT_ADDRESS: &str = "10.88.0.254";

/// Returns the management address of a host.
#[must_use]
pub fn host_address(host: &str) -> String {
    let at = HOSTS.iter().position(|known| *known == host).unwrap_or(HOSTS.len());
    format!("10.77.0.{}", at + 1)
}

/// Whether a host is plugged into the management network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plug {
    /// It is.
    In,
    /// It is not.
    Out,
}

/// The namespaces and the directory of one run. Dropping it ends what runs in them and removes both.
#[derive(Debug)]
pub struct Lab {
    prefix: String,
    dir: PathBuf,
}

impl Lab {
    /// Makes the namespaces and moves the calling thread into the switch. Call before any other thread exists.
    ///
    /// # Errors
    ///
    /// Fails where `ip` does: without root, or in a kernel without namespaces or bridges.
    pub fn create() -> Result<Self> {
        sweep()?;
        let prefix = format!("vf{}", std::process::id());
        let dir = PathBuf::from(format!("/tmp/vf-{}", std::process::id()));
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let lab = Self { prefix, dir };
        lab.build()?;
        lab.enter("sw")?;
        Ok(lab)
    }

    /// Returns the directory of this run: short, since socket paths are limited to 107 bytes.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the full name of the namespace of `part`: a host, `pl`, `cl` or `sw`.
    #[must_use]
    pub fn namespace(&self, part: &str) -> String {
        format!("{}-{part}", self.prefix)
    }

    /// Moves the calling thread into a namespace.
    ///
    /// # Errors
    ///
    /// Fails if there is no such namespace.
    pub fn enter(&self, part: &str) -> Result<()> {
        let path = namespace_path(&self.namespace(part));
        let file = fs::File::open(&path).with_context(|| format!("open {}", path.display()))?;
        setns(file, CloneFlags::CLONE_NEWNET).with_context(|| format!("enter {}", path.display()))
    }

    /// Returns the processes in the namespace of `part`, but for the runner.
    ///
    /// # Errors
    ///
    /// Fails if there is no such namespace.
    pub fn processes(&self, part: &str) -> Result<Vec<i32>> {
        processes_in(&self.namespace(part))
    }

    /// Returns the network interfaces of `part` beyond those the lab made: taps that were left.
    ///
    /// # Errors
    ///
    /// Fails where `ip` does.
    pub fn extra_links(&self, part: &str) -> Result<Vec<String>> {
        let output = ip_output(&["-n", &self.namespace(part), "-o", "link", "show"])?;
        let ours = ["lo", "mgmt0", "br0", "guest0"];
        Ok(output
            .lines()
            .filter_map(|line| line.split(':').nth(1))
            .filter_map(|name| name.trim().split('@').next())
            .filter(|name| !ours.contains(name))
            .map(str::to_owned)
            .collect())
    }

    /// Makes a tap on a host's guest bridge, for a QEMU process that no agent starts.
    ///
    /// # Errors
    ///
    /// Fails where `ip` does.
    pub fn add_tap(&self, host: &str, tap: &str) -> Result<()> {
        self.batch(
            host,
            &format!("tuntap add {tap} mode tap\nlink set {tap} master br0\nlink set {tap} up\n"),
        )
    }

    /// Removes an interface of `part`.
    ///
    /// # Errors
    ///
    /// Fails where `ip` does.
    pub fn remove_link(&self, part: &str, link: &str) -> Result<()> {
        ip(&["-n", &self.namespace(part), "link", "del", link])
    }

    /// Plugs a host into the management network, or pulls its plug. Nobody is told: packets are lost.
    ///
    /// # Errors
    ///
    /// Fails where `ip` does.
    pub fn set_plug(&self, host: &str, plug: Plug) -> Result<()> {
        let state = match plug {
            Plug::In => "up",
            Plug::Out => "down",
        };
        // The switch's end, so that the host's own interface keeps its address and its routes.
        self.batch("sw", &format!("link set m-{host} {state}\n"))
    }

    /// Returns the TCP ports on which something listens in `part`.
    ///
    /// # Errors
    ///
    /// Fails if the namespace has no process to look through.
    pub fn listening_ports(&self, part: &str) -> Result<Vec<u16>> {
        let text = Command::new("ip")
            .args([
                "netns",
                "exec",
                &self.namespace(part),
                "cat",
                "/proc/net/tcp",
                "/proc/net/tcp6",
            ])
            .output()
            .context("read /proc/net/tcp")?;
        Ok(listening(&String::from_utf8_lossy(&text.stdout)))
    }

    /// Ends every process in the namespaces of hosts, planner and client, by process id.
    pub fn end_processes(&self) {
        for part in self.parts().iter().filter(|part| *part != "sw") {
            end_processes_in(&self.namespace(part));
        }
    }

    fn parts(&self) -> Vec<String> {
        let hosts = HOSTS.iter().map(|host| (*host).to_owned());
        hosts.chain(["pl", "cl", "sw"].map(str::to_owned)).collect()
    }

    fn build(&self) -> Result<()> {
        for part in self.parts() {
            ip(&["netns", "add", &self.namespace(&part)])?;
        }
        let mut switch = String::from(
            "link set lo up\n\
             link add mgmt type bridge\nlink set mgmt up\naddr add 10.77.0.254/24 dev mgmt\n\
             link add guest type bridge\nlink set guest up\n",
        );
        let mut plug = |bridge: &str, port: &str, part: &str, peer: &str| {
            let namespace = self.namespace(part);
            switch.push_str(&format!(
                "link add {port} type veth peer name {peer} netns {namespace}\n\
                 link set {port} master {bridge}\nlink set {port} up\n"
            ));
        };
        plug("mgmt", "m-pl", "pl", "mgmt0");
        plug("guest", "g-cl", "cl", "guest0");
        for host in HOSTS {
            plug("mgmt", &format!("m-{host}"), host, "mgmt0");
            plug("guest", &format!("g-{host}"), host, "guest0");
        }
        self.batch("sw", &switch)?;
        for host in HOSTS {
            let address = host_address(host);
            self.batch(
                host,
                &format!(
                    "link set lo up\naddr add {address}/24 dev mgmt0\nlink set mgmt0 up\n\
                     link add br0 type bridge\nlink set br0 up\n\
                     link set guest0 master br0\nlink set guest0 up\n"
                ),
            )?;
        }
        let mut planners = String::from("link set lo up\nlink set mgmt0 up\n");
        for address in PLANNER_ADDRESSES {
            planners.push_str(&format!("addr add {address}/24 dev mgmt0\n"));
        }
        self.batch("pl", &planners)?;
        self.batch(
            "cl",
            &format!(
                "link set lo up\naddr add {CLIENT_ADDRESS}/24 dev guest0\nlink set guest0 up\n"
            ),
        )
    }

    fn batch(&self, part: &str, commands: &str) -> Result<()> {
        let namespace = self.namespace(part);
        let mut child = Command::new("ip")
            .args(["-n", &namespace, "-batch", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("run ip")?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(commands.as_bytes()).context("write to ip")?;
        }
        let output = child.wait_with_output().context("wait for ip")?;
        if !output.status.success() {
            bail!(
                "set up namespace {namespace}: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.end_processes();
        for part in self.parts() {
            ip(&["netns", "del", &self.namespace(&part)]).ok();
        }
        fs::remove_dir_all(&self.dir).ok();
    }
}

/// Reads the listening ports out of the text of `/proc/net/tcp`.
fn listening(text: &str) -> Vec<u16> {
    let ports: BTreeSet<u16> = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| fields.get(3) == Some(&"0A"))
        .filter_map(|fields| u16::from_str_radix(fields.get(1)?.rsplit(':').next()?, 16).ok())
        .collect();
    ports.into_iter().collect()
}

fn namespace_path(namespace: &str) -> PathBuf {
    Path::new("/var/run/netns").join(namespace)
}

fn processes_in(namespace: &str) -> Result<Vec<i32>> {
    let path = namespace_path(namespace);
    let wanted = fs::metadata(&path).with_context(|| format!("look at {}", path.display()))?;
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("read /proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(there) = fs::metadata(entry.path().join("ns/net")) else { continue };
        if (there.ino(), there.dev()) == (wanted.ino(), wanted.dev()) && pid != own {
            found.push(pid);
        }
    }
    Ok(found)
}

fn end_processes_in(namespace: &str) {
    let end = Instant::now() + Duration::from_secs(5);
    while let Ok(pids) = processes_in(namespace) {
        // A zombie whose parent is slow to reap it is over, and has no command line any more.
        let alive: Vec<_> = pids.into_iter().filter(|pid| !is_zombie(*pid)).collect();
        if alive.is_empty() || Instant::now() > end {
            return;
        }
        for pid in alive {
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
        std::thread::yield_now();
    }
}

/// Says whether a process has ended and only waits for its parent.
#[must_use]
pub fn is_zombie(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| stat.rsplit(')').next().map(|rest| rest.trim_start().starts_with('Z')))
        .unwrap_or(true)
}

/// Removes what runs that were killed have left: namespaces and directories of runners that are gone.
fn sweep() -> Result<()> {
    let gone = |name: &str, prefix: &str| {
        name.strip_prefix(prefix)
            .and_then(|rest| rest.split('-').next())
            .and_then(|pid| pid.parse::<u32>().ok())
            .is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    };
    for name in names_in("/var/run/netns") {
        if gone(&name, "vf") {
            end_processes_in(&name);
            ip(&["netns", "del", &name])?;
        }
    }
    for name in names_in("/tmp") {
        if gone(&name, "vf-") {
            fs::remove_dir_all(Path::new("/tmp").join(&name)).ok();
        }
    }
    Ok(())
}

fn names_in(dir: &str) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn ip(arguments: &[&str]) -> Result<()> {
    ip_output(arguments).map(|_| ())
}

fn ip_output(arguments: &[&str]) -> Result<String> {
    let output = Command::new("ip").args(arguments).output().context("run ip (of iproute2)")?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        bail!("ip {}: {}", arguments.join(" "), complaint.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_ports_are_read_from_proc() {
        let text = "  sl  local_address rem_address   st tx_queue\n\
                    0: 0100007F:2387 00000000:0000 0A 00000000:00000000\n\
                    1: 0100007F:2388 0100007F:9999 01 00000000:00000000\n";
        assert_eq!(listening(text), [0x2387]);
    }

    #[test]
    fn hosts_have_addresses_of_their_own() {
        assert_eq!(host_address("a"), "10.77.0.1");
        assert_eq!(host_address("c"), "10.77.0.3");
    }
}
