use std::os::unix::fs::PermissionsExt as _;

use vmferry_tls::Role;

use super::*;

/// 2026-01-01, so that nothing hangs on today.
const NOW: u64 = 1_767_225_600;
const DAY: u64 = 86_400;

fn validity(days: u32) -> Validity {
    Validity { now: NOW, days }
}

fn identity(role: Role, name: &str) -> Identity {
    Identity::new(role, name).unwrap()
}

/// Makes an authority and host a in a fresh folder.
fn fleet() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let (pki, host) = (folder.path().join("pki"), folder.path().join("a"));
    init(&pki, "test", validity(3650), Existing::Keep).unwrap();
    let names =
        Names { dns: vec!["a.example".to_owned()], addresses: vec!["10.0.0.1".parse().unwrap()] };
    let host_a = identity(Role::Host, "a");
    issue(
        &Order { pki: &pki, identity: &host_a, names: &names, out: &host, validity: validity(365) },
        Existing::Keep,
    )
    .unwrap();
    (folder, pki, host)
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn own(shown: &Shown) -> &show::Row {
    shown.certificates.iter().find(|row| row.role != "authority").unwrap()
}

#[test]
fn an_identity_is_issued_with_its_names_and_keys_are_nobody_elses() {
    let (_folder, pki, host) = fleet();
    assert_eq!((mode(&pki.join("ca-key.pem")), mode(&host.join("server-key.pem"))), (0o600, 0o600));
    assert_eq!(mode(&host), 0o700);
    let shown = show(&host, NOW).unwrap();
    assert_eq!(shown.problem, "");
    assert_eq!(shown.certificates.len(), 2, "{shown:?}");
    let row = own(&shown);
    assert_eq!((row.identity.as_str(), row.role.as_str()), ("vmferry://host/a", "host"));
    assert_eq!(row.names, ["a.host.vmferry", "a.example", "10.0.0.1"]);
    assert_eq!((row.not_after.as_str(), row.days_left), ("2027-01-01T00:00:00Z", 365));
    assert_eq!(row.fingerprint.len(), 64);
    let json = serde_json::to_value(&shown).unwrap();
    assert_eq!(json["certificates"][1]["state"], "valid");
}

#[test]
fn an_operator_shows_nothing_to_whoever_connects() {
    let (folder, pki, _) = fleet();
    let out = folder.path().join("ann");
    let ann = identity(Role::Operator, "ann");
    issue(
        &Order {
            pki: &pki,
            identity: &ann,
            names: &Names::default(),
            out: &out,
            validity: validity(90),
        },
        Existing::Keep,
    )
    .unwrap();
    assert!(out.join("client-key.pem").exists() && !out.join("server-key.pem").exists());
    assert_eq!(show(&out, NOW).unwrap().problem, "");
}

#[test]
fn nothing_is_replaced_unasked() {
    let (_folder, pki, host) = fleet();
    let before = std::fs::read(pki.join("ca-key.pem")).unwrap();
    let refused = init(&pki, "test", validity(1), Existing::Keep).unwrap_err();
    assert!(refused.report().contains("--replace"), "{}", refused.report());
    assert_eq!(std::fs::read(pki.join("ca-key.pem")).unwrap(), before);
    let host_a = identity(Role::Host, "a");
    let again = |existing| {
        issue(
            &Order {
                pki: &pki,
                identity: &host_a,
                names: &Names::default(),
                out: &host,
                validity: validity(1),
            },
            existing,
        )
    };
    let refused = again(Existing::Keep).unwrap_err();
    assert!(refused.report().contains("vmferry pki renew"), "{}", refused.report());
    assert!(again(Existing::Replace).unwrap().replaced.contains(&"server-key.pem".to_owned()));
}

#[test]
fn a_renewal_keeps_the_identity_and_its_names_and_takes_a_new_key() {
    let (_folder, pki, host) = fleet();
    let before = show(&host, NOW).unwrap();
    let key = std::fs::read(host.join("server-key.pem")).unwrap();
    let made = renew(&pki, &host, NOW + 100 * DAY, None).unwrap();
    assert_eq!(made.identity, "vmferry://host/a");
    let after = show(&host, NOW + 100 * DAY).unwrap();
    assert_eq!((own(&after).days_left, after.problem.as_str()), (365, ""));
    assert_eq!(own(&after).names, own(&before).names);
    assert_ne!(own(&after).serial, own(&before).serial);
    assert_ne!(std::fs::read(host.join("server-key.pem")).unwrap(), key);
}

#[test]
fn what_has_ended_is_shown_as_such_and_can_be_renewed() {
    let (_folder, pki, host) = fleet();
    let late = NOW + 400 * DAY;
    let shown = show(&host, late).unwrap();
    assert_eq!((own(&shown).state.as_str(), own(&shown).days_left), ("ended", -35));
    assert!(shown.problem.contains("vmferry pki renew"), "{}", shown.problem);
    assert_eq!(own(&show(&host, NOW + 360 * DAY).unwrap()).state, "ends_soon");
    renew(&pki, &host, late, Some(30)).unwrap();
    assert_eq!(show(&host, late).unwrap().problem, "");
}

#[test]
fn a_certificate_does_not_outlive_its_authority() {
    let (folder, pki, _) = fleet();
    let out = folder.path().join("b");
    let host_b = identity(Role::Host, "b");
    let late = Validity { now: NOW + 3600 * DAY, days: 365 };
    let made = issue(
        &Order {
            pki: &pki,
            identity: &host_b,
            names: &Names::default(),
            out: &out,
            validity: late,
        },
        Existing::Keep,
    )
    .unwrap();
    assert!(made.notes[0].contains("authority"), "{made:?}");
    let ended = Validity { now: NOW + 3700 * DAY, days: 1 };
    let refused = issue(
        &Order {
            pki: &pki,
            identity: &host_b,
            names: &Names::default(),
            out: &out,
            validity: ended,
        },
        Existing::Replace,
    )
    .unwrap_err();
    assert!(refused.report().contains("vmferry pki init"), "{}", refused.report());
}

#[test]
fn a_new_authority_is_trusted_before_anybody_shows_its_certificates() {
    let (_folder, pki, host) = fleet();
    let made = init(&pki, "second", validity(3650), Existing::Replace).unwrap();
    assert_eq!(made.replaced, ["ca-cert.pem", "ca-key.pem"]);
    let serial = own(&show(&host, NOW).unwrap()).serial.clone();
    trust(&pki, &host).unwrap();
    let shown = show(&host, NOW).unwrap();
    assert_eq!((shown.certificates.len(), shown.problem.as_str()), (3, ""));
    assert_eq!(own(&shown).serial, serial);
    renew(&pki, &host, NOW, None).unwrap();
    let shown = show(&host, NOW).unwrap();
    assert!(own(&shown).issuer.contains("second"), "{shown:?}");
    assert_eq!(shown.problem, "");
}

#[test]
fn names_that_cannot_be_are_refused_by_their_option() {
    let (folder, pki, _) = fleet();
    let out = folder.path().join("c");
    let host_c = identity(Role::Host, "c");
    // The last is another host's.
    for name in ["a b", "", "b.host.vmferry"] {
        let names = Names { dns: vec![name.to_owned()], addresses: Vec::new() };
        let validity = validity(1);
        let order = Order { pki: &pki, identity: &host_c, names: &names, out: &out, validity };
        let refused = issue(&order, Existing::Keep).unwrap_err();
        assert!(refused.report().contains("--dns"), "{}", refused.report());
    }
    assert!(!out.exists());
    let nowhere = folder.path().join("nowhere");
    let refused = issue(
        &Order {
            pki: &nowhere,
            identity: &host_c,
            names: &Names::default(),
            out: &out,
            validity: validity(1),
        },
        Existing::Keep,
    )
    .unwrap_err();
    assert!(refused.report().contains("--pki"), "{}", refused.report());
}
