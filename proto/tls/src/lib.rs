//! Who speaks to whom: certificates, the identities in them, and connections that prove both ends.
//!
//! Every host, planner and operator has one identity, written into its certificate as a URI:
//! `vmferry://host/a`. One authority signs all of them. Whoever takes a connection knows the other
//! end's identity by its certificate alone; names and addresses prove nothing.
//!
//! ```text
//! files ──► loaded (checked as a whole) ──► live (follows the files) ──► accept, connect
//! ```
//!
//! **Invariant:** a connection is handed out only after its handshake; where one is plain text, that
//! was configured, and its [`Caller`] says so. **Invariant:** what could not be checked is not used:
//! a broken file keeps what was loaded before, or keeps the program from starting.

mod accept;
mod authorize;
mod certificate;
mod connect;
mod connection;
mod identity;
#[cfg(feature = "issue")]
pub mod issue;
mod live;
mod loaded;
mod verify;

pub use self::accept::{Acceptor, Protocol};
pub use self::authorize::Authorized;
pub use self::certificate::{Certificate, CertificateError, read_pem};
pub use self::connect::{AddressError, ConnectError, Connector, Scheme, channel, endpoint};
pub use self::connection::{Caller, Connection, Guarded, Peer};
pub use self::identity::{Identity, InvalidIdentity, Role};
pub use self::live::{Live, Looked, Security};
pub use self::loaded::{CA_FILE, Expiry, LoadError, Loaded, QemuEnd, Use, file_name, key_name};
pub use self::verify::Expected;

/// Returns the seconds since 1970.
#[must_use]
pub fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
