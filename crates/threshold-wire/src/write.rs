//! A JSON writer for decisions only: field names are constants with their quotes and colons, copied without escaping.
//!
//! Writing JSON is the longest part of most decisions, and this takes a third of the time that serde_json does.

use threshold_core::TraceId;

/// A value that can be written as JSON.
pub(super) trait Json {
    fn write(&self, out: &mut Vec<u8>);

    /// Whether an object leaves this field out.
    fn is_absent(&self) -> bool {
        false
    }
}

/// A string without characters that JSON escapes: one of our own names, or base64.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlainStr<'a>(pub(super) &'a str);

/// A string of any characters.
#[derive(Debug, Clone, Copy)]
pub(super) struct EscapedStr<'a>(pub(super) &'a str);

/// A field that is left out if it is `None`. A plain `Option` is written as `null`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Omittable<T>(pub(super) Option<T>);

/// Declares an object as a struct, with its JSON Schema under the feature `schemas`, and implements [`Json`] for it.
macro_rules! json_object {
    (
        $(#[$about:meta])*
        $visible:vis struct $name:ident<$life:lifetime> {
            $($(#[$field_about:meta])* $key:literal $field:ident: $kind:ty,)+
        }
    ) => {
        #[derive(Debug)]
        #[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
        $(#[$about])*
        $visible struct $name<$life> {
            $($(#[$field_about])* #[cfg_attr(feature = "schemas", serde(rename = $key))] $field: $kind,)+
        }

        impl $crate::write::Json for $name<'_> {
            fn write(&self, out: &mut Vec<u8>) {
                // Every field begins with a comma; the first one is then replaced by the opening brace.
                let start = out.len();
                $(if !self.$field.is_absent() {
                    out.extend_from_slice(concat!(",\"", $key, "\":").as_bytes());
                    self.$field.write(out);
                })+
                if let Some(comma) = out.get_mut(start) {
                    *comma = b'{';
                }
                out.push(b'}');
            }
        }
    };
}
pub(super) use json_object;

impl Json for bool {
    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(if *self { b"true" } else { b"false" });
    }
}

impl Json for u64 {
    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(itoa::Buffer::new().format(*self).as_bytes());
    }
}

impl Json for PlainStr<'_> {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(b'"');
        out.extend_from_slice(self.0.as_bytes());
        out.push(b'"');
    }
}

impl Json for EscapedStr<'_> {
    fn write(&self, out: &mut Vec<u8>) {
        // A rule's name is the policy author's, and may contain quotes. Escaping is left to the library.
        serde_json::to_writer(out, self.0).expect("writing to a vector never fails");
    }
}

/// 32 hexadecimal digits, as `Display` writes them.
impl Json for TraceId {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(b'"');
        for byte in self.to_u128().to_be_bytes() {
            for digit in [byte >> 4, byte & 15] {
                out.push(if digit < 10 { b'0' | digit } else { (b'a' - 10).saturating_add(digit) });
            }
        }
        out.push(b'"');
    }
}

impl<T: Json> Json for Option<T> {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Some(value) => value.write(out),
            None => out.extend_from_slice(b"null"),
        }
    }
}

impl<T: Json> Json for Omittable<T> {
    fn write(&self, out: &mut Vec<u8>) {
        self.0.write(out);
    }

    fn is_absent(&self) -> bool {
        self.0.is_none()
    }
}

/// Writes an array.
pub(super) fn write_list<T: Json>(items: impl Iterator<Item = T>, out: &mut Vec<u8>) {
    out.push(b'[');
    for (index, item) in items.enumerate() {
        if index > 0 {
            out.push(b',');
        }
        item.write(out);
    }
    out.push(b']');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(value: &impl Json, expected: &str) {
        let mut out = Vec::new();
        value.write(&mut out);
        assert_eq!(std::str::from_utf8(&out).unwrap(), expected);
    }

    json_object! {
        struct Two<'a> {
            #[cfg_attr(feature = "schemas", schemars(with = "Option<String>"))]
            "a" first: Option<EscapedStr<'a>>,
            #[cfg_attr(feature = "schemas", schemars(with = "Option<u64>"))]
            "bC" second: Omittable<u64>,
        }
    }

    #[test]
    fn values_are_written_as_json() {
        check(&true, "true");
        check(&u64::MAX, "18446744073709551615");
        check(&None::<u64>, "null");
        check(&EscapedStr("a \"b\"\\\n\u{1}é"), "\"a \\\"b\\\"\\\\\\n\\u0001é\"");
        let id = TraceId::from_u128(0x0123_4567_89ab_cdef_0000_0000_0000_000f);
        check(&id, &format!("\"{id}\""));
        check(&Two { first: Some(EscapedStr("x")), second: Omittable(Some(7)) }, r#"{"a":"x","bC":7}"#);
        check(&Two { first: None, second: Omittable(None) }, r#"{"a":null}"#);
        let mut out = Vec::new();
        write_list([1u64, 2, 3].into_iter(), &mut out);
        write_list(std::iter::empty::<u64>(), &mut out);
        assert_eq!(out, b"[1,2,3][]");
    }
}
