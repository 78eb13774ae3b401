//! A refusal that arrives whatever its size.
//!
//! gRPC sends a status as headers, and most clients take no more than 16 KiB of them: what is
//! longer arrives as a broken connection that says nothing. Names that strangers made up and
//! reasons of a thousand hosts are cut, the code and the first reasons are not.

use prost::Message as _;
use tonic::{Code, Status};

use crate::v1::{Blocker, ErrorDetail};

/// How long a text may be. Bytes beyond ASCII take three on the wire.
const TEXT_BYTES_MAX: usize = 1 << 10;
/// How long the details may be; on the wire they take four thirds of it.
const DETAIL_BYTES_MAX: usize = 6 << 10;

/// Makes a status of a refusal.
#[must_use]
pub fn status(code: Code, message: &str, mut detail: ErrorDetail) -> Status {
    detail.field = cut(&detail.field);
    for blocker in &mut detail.blockers {
        blocker.message = cut(&blocker.message);
    }
    let mut dropped = 0;
    while detail.encoded_len() > DETAIL_BYTES_MAX && detail.blockers.pop().is_some() {
        dropped += 1;
    }
    if dropped > 0 {
        detail.blockers.push(Blocker {
            code: "more".to_owned(),
            message: format!("{dropped} more reasons; the REST API names all of them"),
            host_id: String::new(),
        });
    }
    Status::with_details(code, cut(message), detail.encode_to_vec().into())
}

/// Cuts a text at a character, and says so.
fn cut(text: &str) -> String {
    if text.len() <= TEXT_BYTES_MAX {
        return text.to_owned();
    }
    format!("{}…", &text[..text.floor_char_boundary(TEXT_BYTES_MAX)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_refusal_arrives_as_it_is() {
        let detail = ErrorDetail { code: "invalid".to_owned(), ..ErrorDetail::default() };
        let status = status(Code::InvalidArgument, "vm: is missing", detail.clone());
        assert_eq!(status.message(), "vm: is missing");
        assert_eq!(ErrorDetail::decode(status.details()).unwrap(), detail);
    }

    #[test]
    fn a_long_refusal_is_cut_and_keeps_its_code() {
        let blocker = Blocker {
            code: "memory".to_owned(),
            message: "é".repeat(4000),
            host_id: "a".to_owned(),
        };
        let detail = ErrorDetail {
            code: "blocked".to_owned(),
            blockers: vec![blocker; 500],
            ..ErrorDetail::default()
        };
        let status = status(Code::FailedPrecondition, &"é".repeat(4000), detail);
        assert!(status.message().len() < 1100 && status.message().ends_with('…'));
        let told = ErrorDetail::decode(status.details()).unwrap();
        assert!(status.details().len() < 7 << 10);
        assert_eq!(told.code, "blocked");
        assert_eq!(told.blockers[0].code, "memory");
        assert!(told.blockers.last().unwrap().message.starts_with("49"), "{told:?}");
    }
}
