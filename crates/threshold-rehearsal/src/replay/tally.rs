//! Counts decisions by verdict, rule and subject, over time and by hour of the week.

use std::fmt::Write as _;
use std::net::IpAddr;

use siphasher::sip::SipHasher13;
use threshold_core::address::AddressGroup;
use threshold_core::policy::{Layer, Policy, UserScope};
use threshold_core::{Decision, Digest, Facts, Plan, Verdict};

use super::rehearsal::ReplayedDecision;
use super::sample::Sample;
use super::series::Series;
use super::top_subjects::{Kind, TopSubjects};
use super::zone::Zone;
use crate::traffic::Moment;

/// The most subjects of each kind that are counted exactly; with more, a sample is counted.
const MAX_SUBJECTS: usize = 1 << 19;
/// The most keys of rules whose peak is kept; with more, a sample.
const MAX_KEYS: usize = 1 << 16;
/// Requests whose subjects and keys are counted in one batch. Each count is a cache miss in a large table, and in a tight loop
/// the processor overlaps many of them.
const BATCH: usize = 256;
/// The layers by name, in their order.
pub(super) const LAYERS: [Layer; 5] = [Layer::Global, Layer::Edge, Layer::Tenant, Layer::User, Layer::Endpoint];

/// Counts of one rule.
#[derive(Debug, Clone, Default)]
pub(super) struct RuleTally {
    /// Requests that matched it.
    pub(super) met: u64,
    /// Requests that it denied. If several limits were exceeded, the one with the longest wait counts.
    pub(super) denied: u64,
    /// Requests that its ladder banned.
    pub(super) banned: u64,
    pub(super) warned: u64,
    /// Requests that exceeded it, also if another rule bound or it only observes.
    pub(super) full: u64,
    /// The times of the first and last verdict other than allow, in microseconds.
    pub(super) first: Option<u64>,
    pub(super) last: u64,
}

/// Verdicts by penalties and lists, without a binding rule.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PenaltyCounts {
    pub(super) denied: u64,
    pub(super) banned: u64,
    pub(super) slowed: u64,
}

/// One address, user or tenant.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Subject {
    pub(super) touched: bool,
}

/// A decision, and what the answer in the log changed about it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settled<'r> {
    pub(super) decision: &'r Decision,
    /// The keys whose charges were given back: the rule does not count this answer, or the request has ended.
    pub(super) returned: &'r [Digest],
}

/// The highest use of one key of one rule.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peak {
    pub(super) rule: usize,
    pub(super) used: u64,
    /// The capacity at that time: a tenant's tier may change, and its limit with it.
    pub(super) capacity: u64,
    /// Whether a request exceeded the limit.
    pub(super) full: bool,
}

impl Peak {
    /// Keeps the fuller of two uses of a key, by their share of the capacity.
    fn merge(&mut self, other: &Self) {
        // Fractions are compared by cross-multiplication: exact, and without a division by a capacity of 0.
        let share = |used: u64, capacity: u64| u128::from(used).saturating_mul(u128::from(capacity));
        if share(other.used, self.capacity) > share(self.used, other.capacity) {
            (self.used, self.capacity) = (other.used, other.capacity);
        }
        self.full |= other.full;
    }
}

/// The first verdict other than allow on a subject.
#[derive(Debug, Clone)]
pub(super) struct FirstTouch {
    pub(super) kind: Kind,
    pub(super) name: String,
    pub(super) at: u64,
    pub(super) verdict: Verdict,
    pub(super) reason: usize,
}

/// One hour of the week.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Hour {
    pub(super) requests: u64,
    pub(super) stopped: u64,
}

/// All counts of a replay.
#[derive(Debug)]
pub(crate) struct Tally {
    pub(crate) requests: u64,
    verdicts: [u64; 5],
    pub(super) rules: Vec<RuleTally>,
    /// By layer; the last entry is for lists.
    pub(super) penalties: [PenaltyCounts; 6],
    /// By kind.
    pub(super) subjects: [Sample<Subject>; 3],
    pub(super) peaks: Sample<Peak>,
    pub(super) top_subjects: TopSubjects,
    pub(super) first: Vec<FirstTouch>,
    pub(super) series: Series,
    /// From Monday.
    pub(super) week: Box<[[Hour; 24]; 7]>,
    pub(super) from: u64,
    pub(super) until: u64,
    /// Whether any request has a size.
    pub(super) saw_bytes: bool,
    /// Requests without an address.
    pub(super) without_address: u64,
    /// The batch that is not yet counted: subjects by kind, and peaks.
    seen: [Vec<(u64, bool)>; 3],
    filled: Vec<(u64, Peak)>,
    ipv6_prefix: u8,
    user_scope: UserScope,
    top: usize,
    zone: Zone,
    name: String,
}

impl Tally {
    pub(super) fn new(policy: &Policy, top: usize, zone: Zone) -> Self {
        let rules = policy.rules().len();
        Self {
            requests: 0,
            verdicts: [0; 5],
            rules: vec![RuleTally::default(); rules],
            penalties: [PenaltyCounts::default(); 6],
            subjects: [MAX_SUBJECTS; 3].map(Sample::new),
            peaks: Sample::new(MAX_KEYS),
            top_subjects: TopSubjects::default(),
            first: Vec::new(),
            series: Series::new(rules.saturating_add(1)),
            week: Box::default(),
            from: 0,
            until: 0,
            saw_bytes: false,
            without_address: 0,
            seen: [const { Vec::new() }; 3],
            filled: Vec::new(),
            ipv6_prefix: policy.identity().ipv6_prefix,
            user_scope: policy.identity().user_scope,
            top,
            zone,
            name: String::new(),
        }
    }

    /// Returns the number of requests of each verdict, with its name in the report.
    pub(super) fn by_verdict(&self) -> [(&'static str, u64); 5] {
        [
            ("allowed", Verdict::Allow),
            ("warned", Verdict::Warn),
            ("slowed", Verdict::Slow),
            ("denied", Verdict::Deny),
            ("banned", Verdict::Ban),
        ]
        .map(|(name, verdict)| (name, self.of(verdict)))
    }

    /// Returns the number of requests with this verdict.
    pub(super) fn of(&self, verdict: Verdict) -> u64 {
        self.verdicts.get(verdict as usize).copied().unwrap_or(0)
    }

    /// Returns the subject of the last verdict other than allow.
    pub(super) fn last_touched(&self) -> &str {
        &self.name
    }

    /// Counts one request. `settled` is `None` if it could not be planned.
    pub(super) fn add(
        &mut self,
        plan: &Plan<'_>,
        settled: Option<Settled<'_>>,
        decided: ReplayedDecision,
        facts: &Facts<'_>,
        at: Moment,
    ) {
        // Requests come in order of time, so the first and the last one are the bounds.
        if self.requests == 0 {
            self.from = at.micros;
        }
        self.until = at.micros;
        self.saw_bytes |= facts.bytes.is_some();
        self.without_address = self.without_address.saturating_add(u64::from(facts.ip.is_none()));
        bump(&mut self.requests);
        if let Some(count) = self.verdicts.get_mut(decided.verdict as usize) {
            bump(count);
        }
        match settled {
            Some(settled) => self.read(plan, settled),
            // Only the rule that made the plan impossible is known. Without this, it would deny requests that it never met.
            None => {
                if let Some(rule) = self.rules.get_mut(decided.reason) {
                    bump(&mut rule.met);
                }
            }
        }
        // A warned or slowed request is touched but not stopped: its client still gets an answer of the application.
        let touched = decided.verdict != Verdict::Allow;
        let stopped = !decided.verdict.allows();
        // Every request, also an allowed one: the share of touched subjects needs the number of all.
        self.count_subjects(facts, touched);
        self.series.add(at.micros.checked_div(1_000_000).unwrap_or(0), stopped.then_some(decided.reason));
        self.count_hour(at, stopped);
        if touched {
            self.touch(settled.map(|settled| settled.decision), decided, facts, at.micros);
        }
        // By the fullest queue: a request may match many rules, and so fill the peaks much faster than the subjects.
        if self.seen.iter().any(|seen| seen.len() >= BATCH) || self.filled.len() >= BATCH {
            self.flush();
        }
    }

    /// Counts the last batch.
    pub(super) fn finish(mut self) -> Self {
        self.flush();
        self
    }

    fn flush(&mut self) {
        for (seen, subjects) in self.seen.iter_mut().zip(&mut self.subjects) {
            for (digest, touched) in seen.drain(..) {
                subjects.change(digest, Subject::default, |subject| subject.touched |= touched);
            }
        }
        for (digest, found) in self.filled.drain(..) {
            self.peaks.change(digest, || found, |peak| peak.merge(&found));
        }
    }

    /// Counts the readings of all matched rules, binding or not.
    fn read(&mut self, plan: &Plan<'_>, settled: Settled<'_>) {
        // Readings are in the order of the matched rules, so the two can be zipped.
        for (reading, charge) in settled.decision.readings.iter().zip(plan.met()) {
            if let Some(rule) = self.rules.get_mut(reading.rule()) {
                bump(&mut rule.met);
                rule.full = rule.full.saturating_add(u64::from(!reading.allowed));
            }
            // A log does not say how long requests lasted, so the use of a concurrency limit is unknown.
            if charge.limit().is_concurrency() {
                continue;
            }
            let [high, low] = charge.key().halves();
            // Both halves are digests, so half of the bits is enough, and XOR keeps what distinguishes them.
            let digest = high ^ low;
            // Tested before the entry is built: with a full table most keys are outside of the sample.
            if self.peaks.takes(digest) {
                let capacity = charge.limit().capacity();
                // The reading was taken between the charge and the answer that gave it back.
                let returned = if settled.returned.contains(&charge.key()) { reading.cost } else { 0 };
                let used = capacity.saturating_sub(reading.remaining).saturating_sub(returned);
                self.filled.push((digest, Peak { rule: reading.rule(), used, capacity, full: !reading.allowed }));
            }
        }
    }

    fn count_subjects(&mut self, facts: &Facts<'_>, touched: bool) {
        let address = facts.ip.map(|ip| address_digest(ip, self.ipv6_prefix));
        let user = facts.user.map(|user| name_digest(&self.user_scope.write(facts.tenant, user)));
        let digests = [address, user, facts.tenant.map(name_digest)];
        for ((digest, seen), subjects) in digests.into_iter().zip(&mut self.seen).zip(&self.subjects) {
            seen.extend(digest.filter(|digest| subjects.takes(*digest)).map(|digest| (digest, touched)));
        }
    }

    fn count_hour(&mut self, at: Moment, stopped: bool) {
        let hours = self.zone.local_secs(at).checked_div(3_600).unwrap_or(0);
        let days = hours.checked_div(24).unwrap_or(0);
        // The Unix epoch was a Thursday.
        let weekday = days.saturating_add(3).checked_rem(7).and_then(|day| usize::try_from(day).ok());
        let hour = hours.checked_rem(24).and_then(|hour| usize::try_from(hour).ok());
        let own = weekday.zip(hour).and_then(|(day, hour)| self.week.get_mut(day)?.get_mut(hour));
        if let Some(own) = own {
            bump(&mut own.requests);
            own.stopped = own.stopped.saturating_add(u64::from(stopped));
        }
    }

    /// Counts a verdict other than allow.
    fn touch(&mut self, decision: Option<&Decision>, decided: ReplayedDecision, facts: &Facts<'_>, micros: u64) {
        let ReplayedDecision { verdict, reason, kind } = decided;
        match self.rules.get_mut(reason) {
            Some(rule) => {
                rule.first.get_or_insert(micros);
                rule.last = micros;
                match verdict {
                    Verdict::Deny => bump(&mut rule.denied),
                    Verdict::Ban => bump(&mut rule.banned),
                    Verdict::Warn => bump(&mut rule.warned),
                    // A slowed request has no binding rule, and is counted as a penalty.
                    Verdict::Allow | Verdict::Slow => {}
                }
            }
            None => self.count_penalty(decision, verdict),
        }
        self.name.clear();
        let _ = match kind {
            Kind::Ip => facts.ip.map_or(Ok(()), |ip| write!(self.name, "{}", AddressGroup::of(ip, self.ipv6_prefix))),
            Kind::User => {
                facts.user.map_or(Ok(()), |user| self.name.write_str(&self.user_scope.write(facts.tenant, user)))
            }
            Kind::Tenant => write!(self.name, "{}", facts.tenant.unwrap_or_default()),
        };
        if self.name.is_empty() {
            self.name.push_str("(nobody)");
        }
        let rule = (reason < self.rules.len()).then_some(reason);
        self.top_subjects.add(kind, &self.name, rule, verdict, micros);
        // Asked only while the list is short, so a scan is cheap.
        let is_new = || !self.first.iter().any(|own| own.kind == kind && own.name == self.name);
        if self.first.len() < self.top && is_new() {
            self.first.push(FirstTouch { kind, name: self.name.clone(), at: micros, verdict, reason });
        }
    }

    fn count_penalty(&mut self, decision: Option<&Decision>, verdict: Verdict) {
        let layer = match decision {
            Some(decision) if verdict == Verdict::Slow => decision.penalty_layer().or(Some(Layer::User)),
            Some(decision) => decision.penalty_layer(),
            None => None,
        };
        // Without a layer it was a list of the policy, which has the last place.
        let at = layer.map_or(LAYERS.len(), |layer| layer as usize);
        if let Some(own) = self.penalties.get_mut(at) {
            match verdict {
                Verdict::Ban => bump(&mut own.banned),
                Verdict::Slow => bump(&mut own.slowed),
                Verdict::Allow | Verdict::Warn | Verdict::Deny => bump(&mut own.denied),
            }
        }
    }
}

fn bump(count: &mut u64) {
    *count = count.saturating_add(1);
}

/// Digests the group of an address: itself, or an IPv6 prefix.
pub(super) fn address_digest(ip: IpAddr, ipv6_prefix: u8) -> u64 {
    match ip.to_canonical() {
        // Unkeyed, so that two runs choose the same sample.
        IpAddr::V4(v4) => SipHasher13::new().hash(&v4.octets()),
        IpAddr::V6(v6) => {
            let beyond = 128_u32.saturating_sub(u32::from(ipv6_prefix));
            SipHasher13::new().hash(&v6.to_bits().checked_shr(beyond).unwrap_or(0).to_be_bytes())
        }
    }
}

pub(super) fn name_digest(name: &str) -> u64 {
    SipHasher13::new().hash(name.as_bytes())
}
