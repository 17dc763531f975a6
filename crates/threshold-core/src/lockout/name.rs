//! The normal form of account names.

use std::collections::BTreeMap;

#[cfg(feature = "login")]
use caseless::Caseless as _;
#[cfg(feature = "login")]
use unicode_normalization::UnicodeNormalization as _;

use crate::key::{Anchors, Digest, DigestKey, Domain, Part};
use crate::policy::{Policy, SubjectError};

/// Returns the normal form of an account's name: NFKC, case-folded, trimmed and without invisible characters. Otherwise each
/// spelling of a name would have attempts of its own.
#[cfg(feature = "login")]
#[must_use]
pub fn canonical_account(name: &str) -> String {
    // Invisible characters go first, because the characters around one may compose.
    let seen = name.chars().filter(|c| !is_invisible(*c));
    // Normalized again: folding case can leave sequences that NFKC composes.
    seen.nfkc().default_case_fold().nfkc().collect::<String>().trim().to_owned()
}

/// Without the feature `login` no policy protects a login, so no name is ever compared with another spelling of it.
#[cfg(not(feature = "login"))]
pub(crate) fn canonical_account(name: &str) -> String {
    name.to_owned()
}

/// Returns the digest of an account, whatever the spelling of its name; `None` where the normal form is empty, and always without the feature `login`. `tenant` is the
/// tenant of the user, where users belong to tenants.
#[must_use]
pub fn account_digest(key: DigestKey, tenant: Option<&str>, name: &str) -> Option<Digest> {
    let name = canonical_account(name);
    let mut digest = key.begin(Domain::Account);
    if let Some(tenant) = tenant {
        digest.text(Part::Tenant, tenant);
    }
    digest.text(Part::User, &name);
    let digest = digest.finish();
    let home = tenant.map_or(digest, |tenant| Anchors::new(key).tenant(tenant));
    (cfg!(feature = "login") && !name.is_empty()).then(|| digest.in_partition(home.partition()))
}

impl Policy {
    /// Returns the digest of an account from the name that operators use; `None` where its normal form is empty.
    ///
    /// # Errors
    /// Fails where users belong to tenants and the name has no tenant: see [`UserScope`](crate::policy::UserScope).
    pub fn account_digest(&self, written: &str) -> Result<Option<Digest>, SubjectError> {
        let (tenant, name) = self.identity().user_scope.read(written)?;
        Ok(self.account_of(tenant.as_deref(), &name))
    }

    /// Returns the digest of an account, in one of the partitions that the users of its tenant are spread over.
    pub(super) fn account_of(&self, tenant: Option<&str>, name: &str) -> Option<Digest> {
        let digest = account_digest(self.key(), tenant, name)?;
        let over = tenant.and_then(|tenant| self.tiers.spread(tenant));
        Some(over.map_or(digest, |over| digest.in_partition(digest.partition().spread(digest, over))))
    }
}

/// Names that are not in normal form, by their normal form. A login finds a banned user by any spelling of the name.
#[derive(Debug, Clone, Default)]
pub struct Spellings(BTreeMap<Box<str>, BTreeMap<Box<str>, usize>>);

impl Spellings {
    /// Adds a name. A name that was added twice must be removed twice.
    pub fn insert(&mut self, name: &str) {
        let folded = canonical_account(name);
        // A name in normal form is found without this table.
        if folded != name {
            let count = self.0.entry(folded.into()).or_default().entry(name.into()).or_default();
            *count = count.saturating_add(1);
        }
    }

    /// Removes a name.
    pub fn remove(&mut self, name: &str) {
        let folded = canonical_account(name);
        let Some(names) = self.0.get_mut(folded.as_str()) else { return };
        if let Some(count) = names.get_mut(name) {
            *count = count.saturating_sub(1);
        }
        names.retain(|_, count| *count > 0);
        if names.is_empty() {
            self.0.remove(folded.as_str());
        }
    }

    /// Returns the names with this normal form.
    pub fn of(&self, folded: &str) -> impl Iterator<Item = &str> {
        self.0.get(folded).into_iter().flat_map(BTreeMap::keys).map(AsRef::as_ref)
    }
}

/// Returns whether a character is invisible on a screen: control characters, interlinear annotations, and what Unicode 16
/// calls `Default_Ignorable_Code_Point` (zero-width spaces and joiners, directions, fillers, variation selectors, tags).
/// `NFKC_Casefold` removes the latter for the same reason.
#[cfg(feature = "login")]
fn is_invisible(c: char) -> bool {
    let ignorable = matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}');
    // Line breaks and tabs are white space: they are trimmed at the ends, and separate words inside a name.
    ignorable || matches!(c, '\u{fff9}'..='\u{fffb}') || c.is_control() && !c.is_whitespace()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names with zero-width characters were accounts of their own, each with its own attempts.
    #[test]
    fn invisible_characters_do_not_make_another_account() {
        let plain = canonical_account("ada@example.com");
        for invisible in [
            '\u{ad}',
            '\u{34f}',
            '\u{200b}',
            '\u{200c}',
            '\u{200d}',
            '\u{200e}',
            '\u{202e}',
            '\u{2060}',
            '\u{2066}',
            '\u{3164}',
            '\u{fe0f}',
            '\u{feff}',
            '\u{ffa0}',
            '\u{fff9}',
            '\u{e0041}',
            '\u{0}',
            '\u{1b}',
            '\u{7f}',
            '\u{9b}',
        ] {
            for name in [
                format!("{invisible}Ada@example.com"),
                format!("a{invisible}{invisible}da@example.com"),
                format!(" ada@example.com {invisible} "),
            ] {
                assert_eq!(canonical_account(&name), plain, "{name:?}");
            }
        }
        assert_eq!(canonical_account("a\u{200b}\u{301}"), canonical_account("á"));
        assert_eq!(canonical_account("\u{200b}\u{3164} \u{feff}"), "");
        assert_ne!(canonical_account("a da"), canonical_account("ada"));
        assert_ne!(canonical_account("a\nda"), canonical_account("ada"));
    }

    #[test]
    fn a_name_is_found_by_its_normal_form_until_it_is_removed_as_often_as_it_was_added() {
        let mut spellings = Spellings::default();
        for name in ["Eve", "EVE", "eve", "Eve", "Adam"] {
            spellings.insert(name);
        }
        let of = |spellings: &Spellings, name| spellings.of(name).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(of(&spellings, "eve"), ["EVE", "Eve"]);
        assert_eq!(of(&spellings, "Eve"), [""; 0]);
        spellings.remove("Eve");
        assert_eq!(of(&spellings, "eve"), ["EVE", "Eve"]);
        for name in ["Eve", "Eve", "EVE", "nobody"] {
            spellings.remove(name);
        }
        assert_eq!(of(&spellings, "eve"), [""; 0]);
        assert_eq!(of(&spellings, "adam"), ["Adam"]);
    }
}
