//! Whatever comes off the wire, nothing panics and nothing is made up.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use serde_json::{Value, json};
use vmferry_qmp::codec::Decoder;
use vmferry_qmp::{Band, Command as _, MigrateInfo, Output, Session, command::QueryMigrate};

const GREETING: &str = "{\"QMP\":{\"version\":{\"qemu\":{\"micro\":2,\"minor\":0,\"major\":10},\
                        \"package\":\"\"},\"capabilities\":[\"oob\"]}}\n";

/// Pieces of real messages, so that noise gets past the first byte.
fn scrap() -> impl Strategy<Value = Vec<u8>> {
    let known = prop::sample::select(vec![
        GREETING,
        "{\"return\":{},\"id\":1}\n",
        "{\"return\":[1,null],\"id\":2}\r\n",
        "{\"return\":{},\"id\":18446744073709551616}\n",
        "{\"error\":{\"class\":7},\"id\":2}\n",
        "{\"error\":null}\n",
        "{\"event\":\"STOP\"}\n",
        "{\"event\":\"MIGRATION\",\"data\":{\"status\":\"novel\"},\"timestamp\":{\"seconds\":-1}}\n",
        "{\"event\":\"MIGRATION\",\"timestamp\":{\"seconds\":9e99,\"microseconds\":\"x\"}}\n",
        "{\"event\":{},\"QMP\":[],\"return\":3,\"id\":[]}\n",
        "[[[[[[[[[[",
        "\n",
        "\u{0}\u{7f}gäst",
    ]);
    prop_oneof![
        3 => known.prop_map(|text| text.as_bytes().to_vec()),
        1 => vec(any::<u8>(), 0..40),
    ]
}

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/noise.regressions",
        ))),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_session_survives_any_bytes(scraps in vec(scrap(), 0..40), piece in 1_usize..50) {
        let bytes = scraps.concat();
        let mut session = Session::new();
        let mut answered = 0;
        let mut sent = 0;
        for bytes in bytes.chunks(piece) {
            let ended = session.handle_bytes(bytes).is_err();
            while session.poll_transmit().is_some() {}
            while let Some(output) = session.poll_output() {
                match output {
                    Output::Event(event) => drop(format!("{:?}", event.view())),
                    Output::Reply { .. } => answered += 1,
                    Output::Ready(_) | Output::Stray(_) => {}
                }
            }
            if ended {
                let after = session.handle_bytes(GREETING.as_bytes());
                prop_assert!(after.is_err());
                prop_assert_eq!(session.poll_output(), None);
                break;
            }
            sent += usize::from(session.request(Band::OutOf, "yank", &json!({})).is_ok());
        }
        prop_assert!(answered <= sent, "{} answers to {} requests", answered, sent);
        drop(session.handle_eof().to_string());
    }

    #[test]
    fn how_bytes_are_cut_does_not_matter(scraps in vec(scrap(), 0..20), cuts in vec(0_usize..600, 0..20)) {
        let bytes = scraps.concat();
        let decode = |pieces: &[&[u8]]| {
            let mut decoder = Decoder::default();
            let mut messages = Vec::new();
            for piece in pieces {
                decoder.handle_bytes(piece);
                loop {
                    match decoder.poll_message() {
                        Ok(Some(message)) => messages.push(format!("{message:?}")),
                        Ok(None) => break,
                        Err(error) => {
                            messages.push(error.to_string());
                            return messages;
                        }
                    }
                }
            }
            messages.extend(decoder.handle_eof().err().map(|error| error.to_string()));
            messages
        };
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
        prop_assert_eq!(decode(&pieces), decode(&[&bytes]));
    }

    #[test]
    fn no_status_is_taken_for_another(word in "[a-z-]{0,20}") {
        let info: MigrateInfo = serde_json::from_value(json!({"status": word})).unwrap();
        let status = info.status.unwrap();
        prop_assert_eq!(status.label(), word);
    }
}

#[test]
fn a_command_without_arguments_says_nothing_of_them() {
    let line = vmferry_qmp::codec::encode_command("execute", QueryMigrate::NAME, &json!({}), 1);
    let value: Value = serde_json::from_slice(&line).unwrap();
    assert_eq!(value, json!({"execute": "query-migrate", "id": 1}));
}
