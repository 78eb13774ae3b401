//! The identities that certificates carry.

use std::fmt;
use std::str::FromStr;

use vmferry_types::HostId;

/// What an identity is for, and thereby what it may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// One host's agent.
    Host,
    /// A planner.
    Planner,
    /// A person, or a program that asks in one's place.
    Operator,
}

impl Role {
    /// Every role.
    pub const EACH: [Self; 3] = [Self::Host, Self::Planner, Self::Operator];

    /// Returns its word.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Planner => "planner",
            Self::Operator => "operator",
        }
    }

    /// Says whether its certificate is shown by servers as well.
    #[must_use]
    pub const fn serves(self) -> bool {
        match self {
            Self::Host | Self::Planner => true,
            Self::Operator => false,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// Says why a text is no identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidIdentity {
    /// It has another form.
    #[error(
        "`{0}` is no identity; one is written vmferry://host/a, .../planner/p1 or .../operator/ann"
    )]
    Form(String),
    /// Its name breaks the rule of host ids.
    #[error("`{name}` cannot be a {role}'s name: {source}")]
    Name {
        /// Whose.
        role: Role,
        /// The name.
        name: String,
        /// The rule.
        source: vmferry_types::InvalidId,
    },
}

/// Who somebody is: `vmferry://host/a`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    role: Role,
    // Planners and operators are named by the same rule as hosts: their names stand in subjects and
    // DNS names as they are.
    name: HostId,
}

impl Identity {
    /// Names somebody.
    ///
    /// # Errors
    ///
    /// Fails where the name breaks the rule of host ids.
    pub fn new(role: Role, name: &str) -> Result<Self, InvalidIdentity> {
        let parsed = name.parse();
        let name = parsed.map_err(|source| InvalidIdentity::Name {
            role,
            name: name.to_owned(),
            source,
        })?;
        Ok(Self { role, name })
    }

    /// Returns a host's identity.
    #[must_use]
    pub const fn host(id: HostId) -> Self {
        Self { role: Role::Host, name: id }
    }

    /// Returns what it is for.
    #[must_use]
    pub const fn role(&self) -> Role {
        self.role
    }

    /// Returns its name among those of its role.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Returns the host, if it is one.
    #[must_use]
    pub fn host_id(&self) -> Option<&HostId> {
        match self.role {
            Role::Host => Some(&self.name),
            Role::Planner | Role::Operator => None,
        }
    }

    /// Returns the organisation in the subject of its certificate.
    #[must_use]
    pub fn organisation(&self) -> String {
        format!("vmferry {}", self.role)
    }

    /// Returns the subject of its certificate as GnuTLS writes it: that is what QEMU compares.
    #[must_use]
    pub fn distinguished_name(&self) -> String {
        format!("O={},CN={}", self.organisation(), self.name)
    }

    /// Returns the DNS name in its certificate by which QEMU knows it. No resolver ever sees it.
    #[must_use]
    pub fn dns_name(&self) -> String {
        format!("{}.{}.vmferry", self.name, self.role)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.role, self.name)
    }
}

/// How every identity begins.
pub(crate) const SCHEME: &str = "vmferry://";

impl FromStr for Identity {
    type Err = InvalidIdentity;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || InvalidIdentity::Form(text.to_owned());
        let (role, name) =
            text.strip_prefix(SCHEME).and_then(|rest| rest.split_once('/')).ok_or_else(form)?;
        let role = Role::EACH.into_iter().find(|known| known.label() == role).ok_or_else(form)?;
        Self::new(role, name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_read_back_as_they_are_written() {
        for text in ["vmferry://host/a", "vmferry://planner/p-1.rack2", "vmferry://operator/ann"] {
            assert_eq!(text.parse::<Identity>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_identity_is_refused() {
        for text in [
            "",
            "host/a",
            "vmferry://host",
            "vmferry://host/",
            "vmferry://host/a/b",
            "vmferry://host/A",
            "vmferry://Host/a",
            "vmferry://root/a",
            "https://host/a",
            "vmferry://host/a?x",
            "vmferry://host/é",
        ] {
            assert!(text.parse::<Identity>().is_err(), "{text}");
        }
    }

    #[test]
    fn one_name_under_two_roles_is_two_identities() {
        let host = Identity::new(Role::Host, "a").unwrap();
        let planner = Identity::new(Role::Planner, "a").unwrap();
        assert_ne!(host.dns_name(), planner.dns_name());
        assert_ne!(host.distinguished_name(), planner.distinguished_name());
        assert!(planner.host_id().is_none() && host.host_id().is_some());
    }
}
