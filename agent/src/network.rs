//! Taps and bridges.
//!
//! A tap belongs to one launch: its name is made of the launch's directory, which is in the
//! journal, so whatever happens it is known which interfaces to remove.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd as _;

use futures::TryStreamExt as _;
use rtnetlink::packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use rtnetlink::{Handle, LinkUnspec};
use vmferry_agent_core::definition::Nic;
use vmferry_agent_core::fence;

/// How much of a digest names a tap.
const TAP_DIGITS: usize = 11;

/// A network could not be set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetworkError {
    #[error("talk to the kernel's network")]
    Connect(#[source] io::Error),
    #[error("create the tap {name}: the agent needs /dev/net/tun and CAP_NET_ADMIN")]
    Tap { name: String, source: io::Error },
    #[error("list the network interfaces")]
    List(#[source] rtnetlink::Error),
    #[error("find the interface {name}")]
    Missing { name: String },
    #[error("put the tap {name} on the bridge {bridge}")]
    Attach { name: String, bridge: String, source: rtnetlink::Error },
}

/// Returns the name of a NIC's tap in one launch: at most 15 bytes.
pub(crate) fn tap_name(launch_dir: &str, nic: &str) -> String {
    let digest = fence::digest(format!("{launch_dir}\0{nic}").as_bytes());
    format!("vf{}", &digest[..TAP_DIGITS])
}

/// Creates the taps and puts them on their bridges. What exists already is taken over.
pub(crate) async fn create(taps: &[(&Nic, &str)]) -> Result<(), NetworkError> {
    if taps.is_empty() {
        return Ok(());
    }
    for (_, name) in taps {
        persist_tap(name)
            .map_err(|source| NetworkError::Tap { name: (*name).to_owned(), source })?;
    }
    with_netlink(async |netlink| {
        let links = interfaces(&netlink).await?;
        for (nic, name) in taps {
            let index = |wanted: &str| {
                links
                    .get(wanted)
                    .map(|link| link.header.index)
                    .ok_or_else(|| NetworkError::Missing { name: wanted.to_owned() })
            };
            let mut link = LinkUnspec::new_with_index(index(name)?).controller(index(&nic.bridge)?);
            if let Some(mtu) = nic.mtu {
                link = link.mtu(mtu);
            }
            netlink.link().set(link.up().build()).execute().await.map_err(|source| {
                NetworkError::Attach {
                    name: (*name).to_owned(),
                    bridge: nic.bridge.clone(),
                    source,
                }
            })?;
        }
        Ok(())
    })
    .await
}

/// Removes taps; one that is not there is removed.
pub(crate) async fn remove(taps: &[String]) {
    if taps.is_empty() {
        return;
    }
    let removed = with_netlink(async |netlink| {
        let links = interfaces(&netlink).await?;
        for name in taps {
            let Some(link) = links.get(name) else { continue };
            if let Err(error) = netlink.link().del(link.header.index).execute().await {
                tracing::warn!(%name, %error, "tap was not removed");
            }
        }
        Ok(())
    })
    .await;
    if let Err(error) = removed {
        tracing::warn!(?taps, error = %crate::error::chain(&error), "taps were not removed");
    }
}

/// What interfaces this host has, as far as an agent cares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Links {
    pub(crate) bridges: Vec<String>,
    /// Taps named as this agent names its own that no process has open.
    pub(crate) idle_taps: Vec<String>,
}

/// Returns this host's interfaces.
pub(crate) async fn links() -> Result<Links, NetworkError> {
    with_netlink(async |netlink| {
        let mut found = Links::default();
        for (name, link) in interfaces(&netlink).await? {
            if is_bridge(&link) {
                found.bridges.push(name);
            } else if is_tap_name(&name) && !link.header.flags.contains(LinkFlags::LowerUp) {
                found.idle_taps.push(name);
            }
        }
        Ok(found)
    })
    .await
}

/// One tap, as the kernel has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tap {
    /// The bridge that it is on; empty if it is on none.
    pub(crate) bridge: String,
    pub(crate) mtu: u32,
    pub(crate) up: Up,
}

/// Whether an interface is up, and somebody has it open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Up {
    #[default]
    No,
    Yes,
}

/// Returns those of the given taps that there are.
pub(crate) async fn taps(names: &[String]) -> Result<BTreeMap<String, Tap>, NetworkError> {
    if names.is_empty() {
        return Ok(BTreeMap::new());
    }
    with_netlink(async |netlink| {
        let all = interfaces(&netlink).await?;
        let named = |index: u32| {
            all.iter().find(|(_, link)| link.header.index == index).map(|(name, _)| name.clone())
        };
        let found = names.iter().filter_map(|name| Some((name.clone(), all.get(name)?)));
        Ok(found.map(|(name, link)| (name, tap(link, named))).collect())
    })
    .await
}

fn tap(link: &LinkMessage, named: impl Fn(u32) -> Option<String>) -> Tap {
    let mut seen = Tap::default();
    for attribute in &link.attributes {
        if let LinkAttribute::Mtu(mtu) = attribute {
            seen.mtu = *mtu;
        } else if let LinkAttribute::Controller(index) = attribute {
            seen.bridge = named(*index).unwrap_or_default();
        }
    }
    let up = LinkFlags::Up | LinkFlags::LowerUp;
    seen.up = if link.header.flags.contains(up) { Up::Yes } else { Up::No };
    seen
}

/// Returns the names of this host's bridges.
pub(crate) async fn bridges() -> Result<Vec<String>, NetworkError> {
    Ok(links().await?.bridges)
}

/// Says whether an interface is named as [`tap_name`] names them.
fn is_tap_name(name: &str) -> bool {
    let digest = name.strip_prefix("vf").unwrap_or_default();
    digest.len() == TAP_DIGITS && digest.bytes().all(|byte| byte.is_ascii_hexdigit())
}

async fn with_netlink<T>(
    work: impl AsyncFnOnce(Handle) -> Result<T, NetworkError>,
) -> Result<T, NetworkError> {
    let (connection, netlink, _) = rtnetlink::new_connection().map_err(NetworkError::Connect)?;
    // The connection is driven only while there is work for it.
    tokio::select! {
        biased;
        done = work(netlink) => done,
        () = connection => Err(NetworkError::Connect(io::ErrorKind::BrokenPipe.into())),
    }
}

async fn interfaces(netlink: &Handle) -> Result<BTreeMap<String, LinkMessage>, NetworkError> {
    let mut links = netlink.link().get().execute();
    let mut found = BTreeMap::new();
    while let Some(link) = links.try_next().await.map_err(NetworkError::List)? {
        let name = link.attributes.iter().find_map(|attribute| {
            if let LinkAttribute::IfName(name) = attribute { Some(name.clone()) } else { None }
        });
        if let Some(name) = name {
            found.insert(name, link);
        }
    }
    Ok(found)
}

fn is_bridge(link: &LinkMessage) -> bool {
    let bridge = |info: &LinkInfo| matches!(info, LinkInfo::Kind(InfoKind::Bridge));
    link.attributes.iter().any(
        |attribute| matches!(attribute, LinkAttribute::LinkInfo(infos) if infos.iter().any(bridge)),
    )
}

/// Creates a tap that stays, with the header that virtio wants.
fn persist_tap(name: &str) -> io::Result<()> {
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    let mut request = ioctl::request(name)?;
    request.flags = ioctl::TAP_FLAGS;
    ioctl::set_interface(tun.as_raw_fd(), &request)?;
    ioctl::persist(tun.as_raw_fd())
}

mod ioctl {
    //! The two calls of `/dev/net/tun` that make a tap.

    use std::io;
    use std::os::fd::RawFd;

    /// A tap without packet information, with virtio's header.
    pub(super) const TAP_FLAGS: libc::c_short = 0x0002 | 0x1000 | 0x4000;

    /// The kernel's `struct ifreq`, as far as these calls read it.
    #[repr(C)]
    pub(super) struct Request {
        name: [u8; 16],
        pub(super) flags: libc::c_short,
        rest: [u8; 22],
    }

    pub(super) fn request(name: &str) -> io::Result<Request> {
        let mut request = Request { name: [0; 16], flags: 0, rest: [0; 22] };
        let bytes = name.as_bytes();
        if bytes.is_empty() || bytes.len() >= request.name.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        request.name[..bytes.len()].copy_from_slice(bytes);
        Ok(request)
    }

    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    const TUNSETPERSIST: libc::c_ulong = 0x4004_54cb;

    pub(super) fn set_interface(tun: RawFd, request: &Request) -> io::Result<()> {
        #[expect(unsafe_code, reason = "there is no safe call for TUNSETIFF")]
        // SAFETY: `request` is a whole `struct ifreq` and lives through the call, which reads it.
        let result = unsafe { libc::ioctl(tun, TUNSETIFF, std::ptr::from_ref(request)) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    pub(super) fn persist(tun: RawFd) -> io::Result<()> {
        #[expect(unsafe_code, reason = "there is no safe call for TUNSETPERSIST")]
        // SAFETY: the argument is a plain number.
        let result = unsafe { libc::ioctl(tun, TUNSETPERSIST, 1) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tap_names_fit_and_differ_by_launch_and_nic() {
        let name = tap_name("/run/vmferry/a-1", "nic0");
        assert_eq!(name.len(), 13);
        assert_ne!(name, tap_name("/run/vmferry/a-2", "nic0"));
        assert_ne!(name, tap_name("/run/vmferry/a-1", "nic1"));
        assert!(is_tap_name(&name) && !is_tap_name("vf0") && !is_tap_name("veth0000000000"));
    }
}
