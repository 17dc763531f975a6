//! Shadow bans that a node has seen, for requests that are decided while the store is away.
//!
//! An outcome tells whether a request is delayed, and not which of its subjects is shadow banned. So a ban that was seen on a
//! request with several subjects is kept under all of them together, and found by requests with the same ones.

use super::{Plan, Verb};
use crate::decision::Decision;
use crate::key::Digest;
use crate::settle::Outcome;
use crate::time::Timestamp;

impl Plan<'_> {
    /// Returns the keys under which a shadow ban of this request can be known.
    pub fn shadow_keys(&self) -> impl Iterator<Item = Digest> {
        let all = (self.subjects.len() > 1).then(|| self.all_subjects());
        self.subjects.iter().map(|subject| subject.key).chain(all)
    }

    /// Returns the shadow bans that this outcome shows, and until when each may last.
    #[must_use]
    pub fn shadow_bans(&self, outcome: &Outcome) -> Vec<(Digest, Timestamp)> {
        // A strike names its subject.
        let struck = outcome.escalations.iter().filter(|strike| strike.shadowed).filter_map(|strike| {
            let key = self.subjects.get(strike.subject)?.key;
            Some((key, self.shadowed_until(strike.subject, outcome)))
        });
        let mut bans: Vec<(Digest, Timestamp)> = struck.collect();
        if outcome.shadowed && bans.is_empty() {
            let key = match self.subjects.as_slice() {
                [subject] => Some(subject.key),
                [] => None,
                _ => Some(self.all_subjects()),
            };
            let until = (0..self.subjects.len()).map(|subject| self.shadowed_until(subject, outcome)).max();
            bans.extend(key.zip(until));
        }
        bans
    }

    /// Returns whether this outcome shows that none of the subjects is shadow banned. One that denies does not tell.
    #[must_use]
    pub fn shows_no_shadow_ban(&self, outcome: &Outcome, decision: &Decision) -> bool {
        !outcome.shadowed && decision.allowed() && self.bill.verb != Verb::Record
    }

    /// Returns the time until which a subject can be shadow banned: the end of its strikes, if the outcome has it.
    fn shadowed_until(&self, subject: usize, outcome: &Outcome) -> Timestamp {
        let warned = outcome.warned_until.get(subject).copied().filter(|until| *until > outcome.at);
        // Otherwise its last strike may have been just now.
        let decay = self.subjects.get(subject).map(|subject| subject.ladder.decay).unwrap_or_default();
        warned.unwrap_or_else(|| outcome.at.plus(decay))
    }

    /// Returns a key of all subjects together.
    fn all_subjects(&self) -> Digest {
        let keys = self.subjects.iter().map(|subject| subject.key.to_u128());
        // Digests are random, so two lists of them have the same sum only by chance.
        Digest::from_u128(keys.fold(0, |sum: u128, key| sum.rotate_left(1).wrapping_add(key)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::Balance;
    use crate::facts::Facts;
    use crate::ladder::Standing;
    use crate::policy::Policy;
    use crate::settle::settle;
    use crate::time::Span;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_630);

    fn rule(name: &str, per: &str) -> String {
        format!("[[rule]]\nname = '{name}'\nper = ['{per}']\nlimit = '1/h'\nladder = 'own'\nstrike = 'request'\n")
    }

    #[test]
    fn a_shadow_ban_is_known_by_its_subject_or_by_all_subjects_of_its_request() {
        let ladder = "[ladders.own]\ndecay = '2h'\nrungs = ['shadow']\n";
        let both = Policy::parse(&format!("{ladder}{}{}", rule("ip", "ip"), rule("user", "user")), &|_| None).unwrap();
        let facts = |host: u8| Facts { user: Some("ada"), ip: Some([192, 0, 2, host].into()), ..Facts::default() };
        let plan = both.plan(&facts(1)).unwrap();
        let (mut balances, mut standings) = (vec![Balance::default(); 2], vec![Standing::default(); 2]);
        let allowed = settle(plan.bill(), &mut balances, &mut standings, NOW);
        assert!(plan.shows_no_shadow_ban(&allowed, &plan.decide(&allowed)));
        assert!(plan.shadow_bans(&allowed).is_empty());
        let struck = settle(plan.bill(), &mut balances, &mut standings, NOW);
        let keys: Vec<Digest> = plan.shadow_keys().collect();
        let until = NOW.plus(Span::from_secs(7200));
        assert_eq!(plan.shadow_bans(&struck).as_slice(), [(keys[0], until), (keys[1], until)]);
        // A look at it strikes nobody, so only the request as a whole is known to be delayed.
        let peek = both.plan_for(Verb::Peek, &facts(1)).unwrap();
        let later = NOW.plus(Span::MINUTE);
        let peeked = settle(peek.bill(), &mut vec![Balance::default(); 2], &mut standings, later);
        assert_eq!(peek.shadow_bans(&peeked).as_slice(), [(keys[2], later.plus(Span::from_secs(7200)))]);
        assert!(!peek.shows_no_shadow_ban(&peeked, &peek.decide(&peeked)));
        assert!(both.plan(&facts(2)).unwrap().shadow_keys().all(|key| key != keys[2]));
    }
}
