//! Tests how reports are read: batches, lines, and the lines of Logpush.

use super::*;
use crate::desk::tests::START;

fn report(body: &str) -> Result<Reported, ApiError> {
    let policy = Policy::parse("[identity]\nlog_identifiers = true", &|_| None).unwrap();
    read(body.as_bytes(), &policy, START, |_| {}, |_| {})
}

fn block(datetime: &str) -> String {
    format!(r#"{{"Action":"block","Datetime":{datetime},"ClientIP":"2001:db8::1"}}"#)
}

#[test]
fn a_time_is_read_in_every_form_of_logpush_and_is_never_ahead() {
    for datetime in [
        "1767225599",
        "1767225599000",
        "1767225599000000",
        "1767225599000000000",
        r#""1767225599000000000""#,
        r#""2025-12-31T23:59:59Z""#,
    ] {
        let read = report(&block(datetime)).unwrap().events;
        assert_eq!(read.first().unwrap().at, Timestamp::from_secs(1_767_225_599), "{datetime}");
        assert_eq!(read.first().unwrap().ip.as_deref(), Some("2001:db8::/64"), "as events show it");
    }
    assert_eq!(report(&block("1800000000")).unwrap().events.first().unwrap().at, START);
    for wrong in ["-1", "0", "1.5", "true", "17672255990", "176722559900", "null", r#""yesterday""#, "[]"] {
        let error = report(&block(wrong)).unwrap_err();
        assert!(error.body.message().starts_with("line 1: Datetime must be a time"), "{wrong}: {:?}", error.body);
    }
}

/// A wrong `Datetime` was answered with "data did not match any variant of untagged enum When".
///
/// Woken by leaving out a field of `FirewallEvent::read`.
#[test]
fn a_wrong_field_of_logpush_is_named() {
    let named = |line: &str| {
        let error = report(line).unwrap_err();
        let body: Value = serde_json::from_str(&threshold_wire::to_json(&error.body)).unwrap();
        (body["field"].clone(), body["message"].as_str().unwrap().to_owned())
    };
    let right = serde_json::json!({"Action": "block", "Datetime": 1_767_225_599});
    let texts = ["ClientIP", "ClientRequestMethod", "ClientRequestPath", "ClientRequestHost", "Description", "RuleID"];
    for name in ["Action"].into_iter().chain(texts) {
        let mut line = right.clone();
        line[name] = Value::from(7);
        assert_eq!(named(&line.to_string()), (Value::from(name), format!("line 1: {name} must be a string")));
        line[name] = Value::Null;
        assert_eq!(report(&line.to_string()).is_ok(), name != "Action");
    }
    for name in ["Action", "Datetime"] {
        let mut line = right.clone();
        line.as_object_mut().unwrap().remove(name);
        let (field, message) = named(&line.to_string());
        assert_eq!(field, name);
        assert!(message.starts_with(&format!("line 1: {name} is missing")), "{message}");
    }
    let (field, message) = named("{\"Action\":\"block\"");
    assert_eq!((field, message.as_str()), (Value::Null, "line 1: no JSON: EOF while parsing an object at column 17"));
}

/// A job may leave out the fields that tell two blocks of one second apart.
///
/// Woken by `digest(0)` for each of them.
#[test]
fn equal_lines_are_several_blocks_and_a_repeated_upload_has_the_same_ids() {
    let body = [block("1767225599").as_str(), "", &block("1767225599"), &block("1767225598")].join("\r\n");
    let ids = |body: &str| report(body).unwrap().events.iter().map(|event| event.id).collect::<Vec<_>>();
    let (first, again) = (ids(&body), ids(&body));
    assert_eq!(first, again);
    assert_eq!(first.iter().collect::<std::collections::HashSet<_>>().len(), 3);
}

/// One bad line refused the whole upload, which Logpush then repeated for ever.
///
/// Woken by returning the first fault, and by leaving out `skip_line`.
#[test]
fn a_wrong_line_is_named_and_the_others_are_taken() {
    let good = block("1767225599");
    for (line, message) in [
        ("{", "line 2: no JSON"),
        ("[]", "line 2: must be an object"),
        (&format!("{{\"x\":\"{}\"}}", "y".repeat(3 * MAX_LINE)), "line 2: it has 65536 bytes or more"),
    ] {
        let taken = report(&format!("{good}\n{line}\n{good}")).unwrap();
        assert_eq!((taken.events.len(), taken.refused, taken.ignored), (2, 1, 0));
        assert!(taken.faults[0].body.message().starts_with(message), "{:?}", taken.faults);
    }
    // Without any good line there is nothing to take.
    let error = report("\n{\nnull\n").unwrap_err();
    assert!(error.body.message().starts_with("line 1: no JSON"), "{:?}", error.body);
    let many = report(&format!("{good}\n{}", "{\n".repeat(100))).unwrap();
    assert_eq!((many.refused, many.faults.len()), (100, MAX_FAULTS));
    assert!(report(" \n ").unwrap_err().body.message().contains("no events"));
}

/// Woken by taking every name that begins with `#` for a digest.
#[test]
fn a_name_that_only_begins_like_a_digest_is_hidden() {
    let policy = Policy::parse("", &|_| None).unwrap();
    let hidden = |name: &str| {
        let body = format!(
            r##"[{{"id":"00000000-0000-4000-8000-000000000000","at":1767225600000,"blocked":true,"userId":"{name}",
            "subject":"user={name}","strikes":1}}]"##
        );
        let event = read(body.as_bytes(), &policy, START, |_| {}, |_| {}).unwrap().events.pop().unwrap();
        [event.user_id.unwrap(), event.strike.unwrap().subject]
    };
    for name in ["#ada", "#0123456789abcde", "#0123456789ABCDEF", "#0123456789abcdef0"] {
        let shown = hidden(name);
        assert!(shown.iter().all(|shown| !shown.contains(name)), "{shown:?}");
    }
    let digest = "#0123456789abcdef";
    assert_eq!(hidden(digest), [digest, "user=#0123456789abcdef"].map(Box::<str>::from));
}

/// `::ffff:198.51.100.201`, an address of a /64 and any text were recorded as they came, and nobody found them.
///
/// Woken by leaving out either use of `printable`, and the check of the address.
#[test]
fn a_reported_address_is_one_as_events_show_it_and_no_text_moves_a_cursor() {
    let policy = Policy::parse("[identity]\nlog_identifiers = true", &|_| None).unwrap();
    let one = |fields: &str| {
        let body =
            format!(r#"[{{"id":"00000000-0000-4000-8000-000000000000","at":1767225600000,"blocked":true,{fields}}}]"#);
        read(body.as_bytes(), &policy, START, |_| {}, |_| {}).map(|mut read| read.events.pop().unwrap())
    };
    let ip = |ip: &str| one(&format!(r#""ip":"{ip}""#)).map(|event| event.ip.unwrap().into_string());
    for (given, shown) in [
        ("2001:db8:2::5", "2001:db8:2::/64"),
        ("2001:db8:2::/64", "2001:db8:2::/64"),
        ("::ffff:198.51.100.201", "198.51.100.201"),
        (" 203.0.113.7", "203.0.113.7"),
        ("#0123456789abcdef", "#0123456789abcdef"),
    ] {
        assert_eq!(ip(given).as_deref(), Ok(shown));
    }
    for wrong in ["nonsense", "203.0.113.7:80", "#0123", "203.0.113.0/33", "\u{202e}1.2.3.4"] {
        let error = ip(wrong).unwrap_err();
        let body: Value = serde_json::from_str(&threshold_wire::to_json(&error.body)).unwrap();
        assert_eq!((error.status.as_u16(), &body["field"], &body["index"]), (400, &"ip".into(), &0.into()), "{body}");
    }
    let odd = "a\u{202e}b";
    let event = one(&format!(
        r#""rule":"{odd}","endpoint":"{odd}","tenant":"{odd}","userId":"{odd}","subject":"user={odd}","strikes":1"#
    ));
    let Event { rule, endpoint, tenant, user_id, strike, .. } = event.unwrap();
    assert_eq!((rule.as_deref(), endpoint.as_deref()), (Some("a\\u202eb"), Some("a\\u202eb")));
    let digest = policy.key().redact(odd);
    assert_eq!((tenant.as_deref(), user_id.as_deref()), (Some(digest.as_str()), Some(digest.as_str())));
    assert_eq!(&*strike.unwrap().subject, "user=a\\u202eb");
}
