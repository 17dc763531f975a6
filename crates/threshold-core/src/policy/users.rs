//! User names under `user_scope`: unique among all users, or written as `TENANT/USER`.

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::ops::Deref;

use arrayvec::ArrayString;
use percent_encoding::{percent_decode_str, percent_encode_byte};

use super::{Layer, ListEntry, Owner, Policy, SubjectError};
use crate::key::{is_redacted, write_name};

/// Where user names are unique: `[identity] user_scope`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UserScope {
    /// Among all users: a name alone identifies a user.
    #[default]
    Global,
    /// Within each tenant. Policies, the API and the command line write `TENANT/USER`, each part percent-encoded; `/USER` is a user
    /// without a tenant.
    Tenant,
}

/// The tenant and the user of a name; the names of global users contain no tenant.
type Parts<'a> = (Option<Cow<'a, str>>, Cow<'a, str>);

impl UserScope {
    /// Returns the canonical name of a user, as lists, bans and settings store it.
    #[must_use]
    pub fn write<'a>(self, tenant: Option<&str>, user: &'a str) -> Cow<'a, str> {
        match self {
            Self::Global => user.into(),
            Self::Tenant => {
                let mut name = String::new();
                // Writing to a string does not fail.
                let _ = write_scoped(&mut name, tenant, user);
                name.into()
            }
        }
    }

    /// Parses a name into tenant and user. The tenant is `None` for a user without one, and for every global user.
    ///
    /// # Errors
    /// If users belong to tenants and the name has no tenant, or is not percent-encoded.
    pub fn read(self, written: &str) -> Result<Parts<'_>, SubjectError> {
        match self {
            Self::Global => Ok((None, written.into())),
            Self::Tenant => read_scoped(written),
        }
    }

    /// Returns the canonical form of a name.
    ///
    /// # Errors
    /// The same as for [`read`](Self::read).
    pub fn spell(self, written: &str) -> Result<Cow<'_, str>, SubjectError> {
        match self {
            Self::Global => Ok(written.into()),
            Self::Tenant => {
                let (tenant, user) = read_scoped(written)?;
                Ok(self.write(tenant.as_deref(), &user).into_owned().into())
            }
        }
    }
}

fn read_scoped(written: &str) -> Result<Parts<'_>, SubjectError> {
    let Some((tenant, user)) = written.split_once('/') else {
        let mut spelled = String::new();
        let _ = encode(&mut spelled, written);
        return Err(SubjectError::NoTenant(written.into(), spelled.into()));
    };
    // A slash within a name is written `%2F`. Two slashes could be split in two ways.
    if user.is_empty() || user.contains('/') {
        return Err(SubjectError::NotTenantUser(written.into()));
    }
    let decoded = |part| decode(part).ok_or_else(|| SubjectError::NotEncoded(written.into()));
    // Split before decoding: an encoded slash is a part of a name.
    let tenant = (!tenant.is_empty()).then(|| decoded(tenant)).transpose()?;
    Ok((tenant, decoded(user)?))
}

/// Decodes percent-encoded text; `None` if it is malformed.
fn decode(part: &str) -> Option<Cow<'_, str>> {
    let is_hex = |digits: &str| digits.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    // The decoder leaves malformed escapes as they are, so `%zz` and `%25zz` would be two names of one user.
    let sound = part.split('%').skip(1).all(is_hex);
    percent_decode_str(part).decode_utf8().ok().filter(|_| sound)
}

fn write_scoped(out: &mut impl Write, tenant: Option<&str>, user: &str) -> fmt::Result {
    encode(out, tenant.unwrap_or_default())?;
    out.write_char('/')?;
    encode(out, user)
}

/// Percent-encodes separators, percent signs, blanks and control characters.
fn encode(out: &mut impl Write, part: &str) -> fmt::Result {
    encode_where(out, part, is_encoded)
}

/// Percent-encodes the characters for which `is_encoded` holds. All of them are ASCII.
pub(super) fn encode_where(out: &mut impl Write, part: &str, is_encoded: fn(char) -> bool) -> fmt::Result {
    for piece in part.split_inclusive(is_encoded) {
        match piece.char_indices().next_back().filter(|(_, last)| is_encoded(*last)) {
            Some((at, last)) => {
                out.write_str(piece.get(..at).unwrap_or_default())?;
                out.write_str(percent_encode_byte(u8::try_from(last).unwrap_or(b'%')))?;
            }
            None => out.write_str(piece)?,
        }
    }
    Ok(())
}

const fn is_encoded(c: char) -> bool {
    matches!(c, '/' | '%' | ' ') || c.is_ascii_control()
}

/// The canonical name of a user who belongs to a tenant. Most names fit without an allocation.
#[derive(Debug)]
pub(crate) enum ScopedName {
    Short(ArrayString<96>),
    Long(String),
}

impl ScopedName {
    pub(crate) fn new(tenant: Option<&str>, user: &str) -> Self {
        let mut short = ArrayString::new();
        match write_scoped(&mut short, tenant, user) {
            Ok(()) => Self::Short(short),
            // Too long for the inline text, which now has a part of it. The whole name is written again.
            Err(_) => Self::Long(UserScope::Tenant.write(tenant, user).into_owned()),
        }
    }
}

impl Deref for ScopedName {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Self::Short(name) => name,
            Self::Long(name) => name,
        }
    }
}

impl Policy {
    /// Returns the canonical form of a subject's key as operators write it.
    ///
    /// # Errors
    /// If a user's name needs a tenant and has none; see [`UserScope`].
    pub fn subject_key<'k>(&self, layer: Layer, key: &'k str) -> Result<Cow<'k, str>, SubjectError> {
        if layer == Layer::User { self.identity().user_scope.spell(key) } else { Ok(key.into()) }
    }

    /// Returns the canonical name of the owner of a setting.
    ///
    /// # Errors
    /// The same as for [`subject_key`](Self::subject_key).
    pub fn owner_name<'k>(&self, owner: Owner, name: &'k str) -> Result<Cow<'k, str>, SubjectError> {
        self.subject_key(if owner == Owner::User { Layer::User } else { Layer::Tenant }, name)
    }

    /// Returns a user's name for display, with secret parts redacted and others as [`write_name`] writes them.
    pub(crate) fn shown_user(&self, tenant: Option<&str>, user: &str) -> String {
        let identity = self.identity();
        let shown = |name: &str, secret: bool| self.shown_name(name, secret);
        let tenant = tenant.map(|tenant| shown(tenant, identity.secret_tenant));
        identity.user_scope.write(tenant.as_deref(), &shown(user, identity.secret_user)).into_owned()
    }

    fn shown_name(&self, name: &str, secret: bool) -> String {
        match secret {
            // The name of a ladder's ban was redacted before it was stored.
            true if is_redacted(name) => name.to_owned(),
            true => self.key().redact(name),
            false => write_name(name).into_owned(),
        }
    }

    /// Returns the key of a list entry or a ban for display, with secret names redacted.
    #[must_use]
    pub fn shown_key(&self, entry: &ListEntry) -> String {
        let identity = self.identity();
        match entry {
            ListEntry::User(name) => match identity.user_scope.read(name) {
                Ok((tenant, user)) => self.shown_user(tenant.as_deref(), &user),
                // The ban was made under another `user_scope`.
                Err(_) => self.shown_user(None, name),
            },
            ListEntry::Tenant(name) => self.shown_name(name, identity.secret_tenant),
            ListEntry::Address(_) => entry.key(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A name reads back as it was written, however long, and two users never share one.
        #[test]
        fn a_scoped_name_reads_back(
            names in prop::collection::vec((prop::option::of("[a/%é \u{1}]{1,40}"), "[a/%é \u{1}]{1,60}"), 2),
        ) {
            let mut written = Vec::new();
            for (tenant, user) in &names {
                let name = UserScope::Tenant.write(tenant.as_deref(), user);
                let (read_tenant, read_user) = UserScope::Tenant.read(&name).unwrap();
                prop_assert_eq!((read_tenant.as_deref(), &*read_user), (tenant.as_deref(), user.as_str()));
                prop_assert_eq!(&*ScopedName::new(tenant.as_deref(), user), &*name);
                prop_assert_eq!(UserScope::Tenant.spell(&name).unwrap(), name.clone());
                written.push(name);
            }
            prop_assert_eq!(written[0] == written[1], names[0] == names[1]);
        }
    }

    #[test]
    fn a_name_has_many_spellings_and_a_bare_one_is_refused() {
        let spell = |written| UserScope::Tenant.spell(written).map(Cow::into_owned);
        assert_eq!(spell("acme/u1"), Ok("acme/u1".to_owned()));
        assert_eq!(spell("%61cme/u%31"), Ok("acme/u1".to_owned()));
        assert_eq!(spell("acme/a%2fb"), Ok("acme/a%2Fb".to_owned()));
        assert_eq!(spell("acme/ada@example.com"), Ok("acme/ada@example.com".to_owned()));
        assert_eq!(spell("/u1"), Ok("/u1".to_owned()));
        assert_eq!(UserScope::Global.spell("a%zz/b/").as_deref(), Ok("a%zz/b/"));
        let bare = spell("u 1").unwrap_err();
        let bare = bare.to_string();
        assert!(bare.contains("\"TENANT/u%201\"") && bare.contains("\"/u%201\""), "{bare}");
        for wrong in ["acme/", "acme/a/b", "acme/a%2", "acme/a%zz", "acme/%ff", "a%/b", ""] {
            assert!(spell(wrong).is_err(), "{wrong}");
        }
    }

    const SCOPED: &str = "[identity]\nuser_scope = 'tenant'\n";

    #[test]
    fn a_policy_refuses_bare_names_where_users_belong_to_tenants() {
        let check = |text: &str| {
            let error = Policy::parse(&format!("{SCOPED}{text}"), &|_| None).unwrap_err();
            let finding = &error.findings()[0];
            assert_eq!(finding.code, "bad-value", "{text}");
            assert!(finding.message.contains("\"TENANT/u1\""), "{}", finding.message);
            let scoped = text.replace("u1", "acme/u1");
            assert!(Policy::parse(&format!("{SCOPED}{scoped}"), &|_| None).is_ok(), "{scoped}");
            assert!(Policy::parse(text, &|_| None).is_ok(), "{text}");
        };
        check("[lists]\nallow = ['user:u1']");
        check("[lists]\ndeny = ['user:u1']");
        check(
            "[tiers.t]\nrequests = '5/h'\n[users.'u1']\ntier = 't'\n[[rule]]\nname = 'r'\nper = ['user']\nlimit = 'tier'",
        );
    }

    #[test]
    fn operators_name_a_user_with_the_tenant() {
        let rule = "[[rule]]\nname = 'r'\nper = ['user']\nlimit = '5/h'\n";
        let mut policy = Policy::parse(&format!("{SCOPED}secret = ['tenant']\n{rule}"), &|_| None).unwrap();
        assert_eq!(policy.ban_target(Layer::User, "acme/u%31"), Ok(ListEntry::User("acme/u1".into())));
        assert_eq!(policy.ban_target(Layer::Tenant, "acme"), Ok(ListEntry::Tenant("acme".into())));
        assert!(policy.ban_target(Layer::User, "u1").is_err());
        let shown = policy.shown_key(&ListEntry::User("acme/u1".into()));
        assert!(shown.starts_with('#') && shown.ends_with("/u1"), "{shown}");
        assert_eq!(policy.shown_key(&ListEntry::User(shown.as_str().into())), shown);
        let odd = policy.shown_key(&ListEntry::User("acme/#0123456789abcdef".into()));
        assert!(odd.ends_with("/##0123456789abcdef"), "{odd}");
        assert_eq!(policy.keys_of(Layer::User, "acme/u1").balances.len(), 1);
        assert_eq!(policy.keys_of(Layer::User, "u1"), crate::plan::SubjectKeys::default());
        let setting = super::super::Setting {
            tier: None,
            limits: std::collections::BTreeMap::new(),
            times: 2,
            until: crate::Timestamp::MAX,
            from: crate::Timestamp::EPOCH,
            by: "ops".into(),
            reason: "r".into(),
        };
        assert_eq!(policy.give(Owner::User, "u1", &setting).unwrap_err().field(), "id");
        policy.give(Owner::User, "acme/u%31", &setting).unwrap();
        let capacity = |tenant| {
            let facts = crate::Facts { tenant, user: Some("u1"), ..crate::Facts::default() };
            policy.plan(&facts).unwrap().charges()[0].limit().quota()
        };
        assert_eq!([Some("acme"), Some("beta"), None].map(capacity), [10, 5, 5]);
        assert!(policy.setting(Owner::User, "acme/u1").is_some() && policy.setting(Owner::User, "u1").is_none());
        // Kept under another scope, it is in force again under this one.
        let mut global = Policy::parse(rule, &|_| None).unwrap();
        global.give(Owner::User, "u1", &setting).unwrap();
        assert_eq!(policy.take_settings_of(&global).len(), 1);
        assert_eq!(policy.forgets(&global).len(), 2);
        assert_eq!(policy.forgets(&policy.clone()), []);
    }
}
