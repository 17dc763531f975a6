//! Compiles one rule.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Loader, is_token, layer_of};
use crate::bill::Terms;
use crate::headers::StaticFields;
use crate::key::{DigestKey, KeyPrefix, Partition};
use crate::ladder::{Ladder, Rung, StrikeMode};
use crate::limit::{Algorithm, Limit, LimitOption, LimitOptions, Quota, Unit};
use crate::policy::file::{ConsistencyName, LayerName, RuleFile, StrikeName, Text, Texts};
use crate::policy::rule::{
    Consistency, CostOf, Disclosure, Layer, LogMode, Measure, Measured, Mode, OnMissing, OnStoreError, Per, Rule,
    StatusSet, SubjectRule,
};
use crate::policy::{Identity, IdentitySource, RecordPlace, UserScope};

/// The key of a rule before its policy is given a key of its own: [`Policy::with_key`](crate::Policy::with_key) replaces it.
const UNKEYED: DigestKey = DigestKey::new([0; 16]);

/// The largest number of shards of a limit: more objects than a million requests a second need at half their load.
const MAX_SHARDS: u32 = 64;

/// How a rule counts the limits of tiers: everything but the quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape {
    options: LimitOptions,
    cost_name: Option<Box<str>>,
    /// The name of the limit, for `limit = "tier:NAME"`; `None` takes the one that is named after the request's category.
    name: Option<Box<str>>,
    /// Over how many shards a large limit is split.
    shards: u32,
}

impl Shape {
    /// Whether rules of this shape may take the limit with this name: that of any category, or only their own.
    pub(crate) fn takes(&self, name: &str) -> bool {
        self.name.as_deref().is_none_or(|own| own == name)
    }

    /// Returns the name of its limit, if that does not depend on the category.
    #[inline]
    pub(crate) fn own_name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Compiles the limit with this name, as [`measured`](Self::measured) does; `None` too where no rule of this shape takes it.
    pub(crate) fn measured_as(&self, name: &str, quota: Quota) -> Result<Option<Measured>, String> {
        // Not compiled, because it may be a limit that this shape cannot have, such as a log of a large quota.
        if self.takes(name) { self.measured(quota) } else { Ok(None) }
    }

    /// Compiles a limit that a single tenant or user is given, as [`measured_as`](Self::measured_as) does. A log that is too long becomes
    /// a window, as where a limit is multiplied: the owner of one tenant cannot change the rule's algorithm.
    pub(crate) fn measured_given(&self, name: &str, quota: Quota) -> Result<Option<Measured>, String> {
        let mut shape = self.clone();
        if let (Some(algorithm), Quota::Per { amount, .. }) = (&mut shape.options.algorithm, quota) {
            *algorithm = algorithm.for_quota(amount);
        }
        shape.measured_as(name, quota)
    }

    /// Returns the limit with this quota, and what it counts; `None` is unlimited.
    pub(crate) fn measured(&self, quota: Quota) -> Result<Option<Measured>, String> {
        // The unit of a quota decides what is counted, so one rule by tier can count requests for one tier and bytes
        // for another.
        let is_bytes = matches!(quota, Quota::Per { unit: Unit::Bytes, .. });
        let cost = match &self.cost_name {
            Some(_) if is_bytes => return Err("a limit in bytes cannot have a named cost".to_owned()),
            Some(name) => CostOf::Named(name.clone()),
            None if is_bytes => CostOf::Bytes,
            None => CostOf::Requests,
        };
        let limit = self.options.of_quota(quota, self.cost_name.is_some()).map_err(|error| error.to_string())?;
        Ok(limit.map(|limit| Measured::new(limit, cost, self.shards)))
    }
}

/// The distinct shapes of the rules with `limit = "tier"` or `"tier:NAME"`.
#[derive(Debug, Default)]
pub(crate) struct Shapes(Vec<Shape>);

impl Shapes {
    pub(crate) fn all(&self) -> impl Iterator<Item = &Shape> {
        self.0.iter()
    }

    fn index(&mut self, shape: Shape) -> usize {
        self.0.iter().position(|own| *own == shape).unwrap_or_else(|| {
            self.0.push(shape);
            self.0.len().saturating_sub(1)
        })
    }
}

/// The other parts of the policy that a rule refers to.
pub(super) struct Context<'c> {
    pub(super) identity: &'c Identity,
    pub(super) ladders: &'c BTreeMap<String, Ladder>,
    pub(super) shapes: &'c mut Shapes,
    pub(super) subjects: &'c mut Vec<SubjectRule>,
}

impl Loader<'_> {
    pub(super) fn rule(&mut self, file: &RuleFile, span: &Range<usize>, context: &mut Context<'_>) -> Option<Rule> {
        self.rule_name(&file.name);
        let per = self.per(file, span)?;
        let layer = file.layer.as_ref().map_or_else(|| layer_of(&per), |layer| layer.value.into());
        let shape = self.shape(file)?;
        let shards = shape.shards;
        let measure = self.measure(file, shape, context.shapes)?;
        self.warn_of_idle_shards(file, shards, &measure);
        let count = file.count.as_ref().and_then(|text| self.statuses(text));
        let block_for = file.block_for.as_ref().and_then(|text| self.span(text));
        let on_missing = file.on_missing.as_ref().map_or(OnMissing::Floor, |name| name.value.into());
        // After the measure: whether a ladder fits depends on what the limit counts.
        let subject = self.subject(file, &per, layer, &measure, context);
        let status = self.status(file);
        let place = self.rule_place(file, &per, context.identity);
        let body = file.body.as_ref().and_then(|text| self.body(text));
        let text = |text: &Option<Text>| text.as_ref().map(|text| text.value.as_str().into());
        let flag = |flag: &Option<crate::policy::file::Located<bool>>| flag.as_ref().is_some_and(|flag| flag.value);
        let strike = file.strike.as_ref().map_or(StrikeMode::Window, |name| name.value.into());
        let mode = file.mode.as_ref().map_or(Mode::Enforce, |name| name.value.into());
        let terms = Terms {
            tag: 0,
            strike,
            block_for,
            enforced: mode == Mode::Enforce,
            by_outcome: count.is_some(),
            varies: matches!(measure, Measure::Tier(_) | Measure::NamedByTier(_)),
        };
        let mut rule = Rule {
            name: file.name.value.as_str().into(),
            layer,
            matches: self.matches(&file.matches),
            per,
            measure,
            count,
            block_for,
            fallback: flag(&file.fallback),
            on_missing,
            subject,
            strike,
            mode,
            consistency: file.consistency.as_ref().map_or(Consistency::Strong, |name| name.value.into()),
            approximate: flag(&file.approximate),
            place,
            shards,
            on_store_error: file.on_store_error.as_ref().map_or(OnStoreError::Local, |name| name.value.into()),
            disclosure: file.disclosure.as_ref().map_or(Disclosure::Full, |name| name.value.into()),
            status,
            message: text(&file.message),
            body,
            period: text(&file.period),
            log: file.log.as_ref().map_or(LogMode::Sampled, |name| name.value.into()),
            allow: self.allowances(file.allow.as_ref()),
            terms,
            prefixes: Vec::new(),
            partition: Partition::from_u16(0),
            counted: 0,
            common: false,
            static_fields: None,
        };
        // The draft has no quota unit for a named cost: `qu` takes registered names only, and without it the field would mean
        // requests.
        rule.static_fields = if file.cost.is_none() { StaticFields::of(&rule) } else { None };
        Some(rule)
    }

    fn rule_place(&mut self, file: &RuleFile, per: &[Per], identity: &Identity) -> Option<RecordPlace> {
        let text = file.place.as_ref()?;
        let place = self.place(text)?;
        if let Some(why) = place.misfit(per, identity.user_scope) {
            self.error(
                "bad-place",
                text.span.clone(),
                why,
                "name records by what the rule is counted by, or by {hash}",
            );
            return None;
        }
        Some(place)
    }

    pub(super) fn place(&mut self, text: &Text) -> Option<RecordPlace> {
        RecordPlace::parse(&text.value).map_err(|error| self.notation("bad-place", text, &error)).ok()
    }

    fn rule_name(&mut self, name: &Text) {
        // Names go into structured header fields, which allow only printable ASCII.
        let plain = name.value.bytes().all(|byte| (0x20..0x7f).contains(&byte) && byte != b'"' && byte != b'\\');
        if name.value.is_empty() || name.value.len() > 64 || !plain {
            let message = "a rule's name is 1 to 64 printable ASCII characters without quotes and backslashes";
            self.error("bad-name", name.span.clone(), message, "it is shown to clients in RateLimit headers");
        }
    }

    fn per(&mut self, file: &RuleFile, span: &Range<usize>) -> Option<Vec<Per>> {
        let Some(texts) = &file.per else {
            let help = "write per = [\"ip\"], [\"user\"], …, or per = [] for one shared budget";
            self.error("no-per", file.name.span.clone(), format!("the rule \"{}\" has no per", file.name.value), help);
            return None;
        };
        let mut per = Vec::new();
        for text in &texts.items {
            match parse_per(&text.value) {
                Some(item) if per.contains(&item) => {
                    self.error("bad-value", text.span.clone(), format!("\"{item}\" is listed twice"), "");
                }
                Some(item) => per.push(item),
                None => {
                    let help = "known: ip, ip/N, tenant, user, tier, category, endpoint, method, host, header:NAME, \
                                fact:NAME";
                    self.error("bad-value", text.span.clone(), format!("unknown \"{}\" in per", text.value), help);
                }
            }
        }
        let is_global = file.layer.as_ref().is_some_and(|layer| layer.value == LayerName::Global);
        // Without a layer in the file the layer follows from `per`, and the two cannot disagree.
        if is_global != per.is_empty() && (is_global || file.layer.is_some()) {
            let at = file.layer.as_ref().map_or(span.clone(), |layer| layer.span.clone());
            self.error(
                "bad-value",
                at,
                "layer = \"global\" and per = [] go together",
                "a budget that all requests share is global",
            );
        }
        Some(per)
    }

    fn shape(&mut self, file: &RuleFile) -> Option<Shape> {
        let algorithm = file.algorithm.as_ref().map(|name| name.value.0);
        let mut belongs = |span: Option<Range<usize>>, option: LimitOption| {
            if let Some(span) = span
                && algorithm.is_some_and(|algorithm| !algorithm.takes(option))
                && let Some(owner) = Algorithm::that_takes(option)
            {
                let message = format!("{} belongs to algorithm = \"{owner}\"", option.name());
                self.error("bad-value", span, message, "leave it out, or change the algorithm");
            }
        };
        belongs(file.anchor.as_ref().map(|anchor| anchor.span.clone()), LimitOption::Anchor);
        belongs(file.buckets.as_ref().map(|buckets| buckets.span.clone()), LimitOption::Buckets);
        belongs(file.burst.as_ref().map(|burst| burst.span.clone()), LimitOption::Burst);
        belongs(file.ttl.as_ref().map(|ttl| ttl.span.clone()), LimitOption::Ttl);
        let defaults = LimitOptions::new();
        let ttl = match &file.ttl {
            Some(text) => self.span(text)?,
            None => defaults.ttl,
        };
        let anchor = file.anchor.as_ref().map_or(defaults.anchor, |anchor| anchor.value.into());
        let options = LimitOptions {
            algorithm,
            anchor,
            buckets: file.buckets.as_ref().map_or(defaults.buckets, |buckets| buckets.value),
            burst: file.burst.as_ref().map(|burst| burst.value),
            ttl,
        };
        let cost_name = file.cost.as_ref().map(|name| name.value.as_str().into());
        Some(Shape { options, cost_name, name: None, shards: self.shards(file) })
    }

    fn shards(&mut self, file: &RuleFile) -> u32 {
        let Some(shards) = &file.shards else { return 1 };
        if !(2..=MAX_SHARDS).contains(&shards.value) {
            let message = format!("shards = {} is not between 2 and {MAX_SHARDS}", shards.value);
            self.error("bad-value", shards.span.clone(), message, "leave it out for one");
            return 1;
        }
        if file.consistency.as_ref().is_some_and(|name| name.value == ConsistencyName::Eventual) {
            let help = "leave it out: an eventual limit is in no object";
            self.error("bad-value", shards.span.clone(), "an eventual limit has no shards", help);
            return 1;
        }
        shards.value
    }

    fn measure(&mut self, file: &RuleFile, mut shape: Shape, shapes: &mut Shapes) -> Option<Measure> {
        let never = file.deny.as_ref().is_some_and(|deny| deny.value);
        let Some(text) = &file.limit else {
            if never {
                return Some(Measure::Fixed(Measured::new(Limit::never(), CostOf::Requests, 1)));
            }
            let message = format!("the rule \"{}\" has no limit", file.name.value);
            self.error("no-limit", file.name.span.clone(), message, "write limit = \"100/min\", or deny = true");
            return None;
        };
        if never {
            self.error("bad-value", text.span.clone(), "deny = true excludes a limit", "leave limit out");
            return None;
        }
        if text.value.trim() == "tier" {
            return Some(Measure::Tier(shapes.index(shape)));
        }
        if let Some(name) = text.value.trim().strip_prefix("tier:") {
            // `tier` and `spread` are keys of a tenant's table that are no limits, so no limit can have their names.
            if name.trim() != name || matches!(name, "" | "tier" | "spread") {
                let message = format!("\"{}\" names no limit of a tier", text.value);
                self.error("bad-limit", text.span.clone(), message, "write limit = \"tier:burst\"");
                return None;
            }
            shape.name = Some(name.into());
            return Some(Measure::NamedByTier(shapes.index(shape)));
        }
        let quota = self.quota(text)?;
        self.warn_of_zero(text, quota);
        match shape.measured(quota) {
            Ok(Some(measured)) => {
                self.warn_of_small_estimate(text, Some(&measured.limit));
                Some(Measure::Fixed(measured))
            }
            Ok(None) => Some(Measure::Unlimited),
            Err(message) => {
                self.error("impossible-limit", text.span.clone(), message, "");
                None
            }
        }
    }

    fn warn_of_idle_shards(&mut self, file: &RuleFile, shards: u32, measure: &Measure) {
        let idle = match measure {
            Measure::Fixed(measured) => measured.shards.is_none(),
            Measure::Unlimited => true,
            // One tier may have a large limit and another a small one.
            Measure::Tier(_) | Measure::NamedByTier(_) => false,
        };
        if let Some(shards) = file.shards.as_ref().filter(|_| idle && shards > 1) {
            let message =
                "the limit is not above 500 a second, or its burst is below the number of shards, so it is not split";
            self.warning("idle-shards", shards.span.clone(), message, "leave shards out");
        }
    }

    fn statuses(&mut self, text: &Text) -> Option<StatusSet> {
        let help = "write count = \"status:401,403\" or \"status:5xx\"";
        let parsed = text.value.strip_prefix("status:").and_then(|list| list.split(',').map(status_range).collect());
        if parsed.is_none() {
            self.error("bad-value", text.span.clone(), format!("\"{}\" is not a list of statuses", text.value), help);
        }
        parsed.map(StatusSet)
    }

    fn status(&mut self, file: &RuleFile) -> u16 {
        let Some(status) = &file.status else { return 429 };
        if !(400..=599).contains(&status.value) {
            self.error(
                "bad-value",
                status.span.clone(),
                "the status of a denial is between 400 and 599",
                "429 suits most services",
            );
        }
        status.value
    }

    /// Parses `allow`: codes and reasons.
    pub(super) fn allowances(&mut self, allow: Option<&Texts>) -> Vec<(Box<str>, Box<str>)> {
        let mut allowances = Vec::new();
        for text in allow.iter().flat_map(|texts| &texts.items) {
            match text.value.split_once(':').map(|(code, reason)| (code.trim(), reason.trim())) {
                Some((code, reason)) if !code.is_empty() && !reason.is_empty() => {
                    allowances.push((code.into(), reason.into()));
                }
                _ => self.error(
                    "bad-value",
                    text.span.clone(),
                    "an allowance needs a code and a reason",
                    "write \"CODE: reason\"",
                ),
            }
        }
        allowances
    }

    fn subject(
        &mut self,
        file: &RuleFile,
        per: &[Per],
        layer: Layer,
        measure: &Measure,
        context: &mut Context<'_>,
    ) -> Option<usize> {
        let Some(name) = &file.ladder else {
            if let Some(strike) = &file.strike {
                self.warning(
                    "no-ladder",
                    strike.span.clone(),
                    "strike has no effect without a ladder",
                    "add ladder = \"graduated\"",
                );
            }
            return None;
        };
        let Some((index, (_, ladder))) = context.ladders.iter().enumerate().find(|(_, (own, _))| **own == name.value)
        else {
            let known: Vec<&str> = context.ladders.keys().map(String::as_str).collect();
            let help = format!("known: {}", known.join(", "));
            self.error("unknown-ladder", name.span.clone(), format!("no ladder is called \"{}\"", name.value), &help);
            return None;
        };
        let identity: Vec<Per> = per.iter().filter(|per| per.is_identity()).cloned().collect();
        self.ladder_fits(file, name, ladder, &identity, measure, context.identity);
        // The order in which a policy lists the parts must not make two subjects of one.
        let mut per = identity;
        per.sort();
        // Standings are stored by the ladder's name, because its index changes with the other ladders of the file.
        let ladder_name: Box<str> = name.value.as_str().into();
        // The address that replaces a missing user may be shared, so it gets strikes only if the policy accepts that.
        let floors = file.ban_shared.as_ref().is_some_and(|flag| flag.value);
        let disclosure = file.disclosure.as_ref().map_or(Disclosure::Full, |name| name.value.into());
        let known = context.subjects.iter_mut().position(|own| own.per == per && own.ladder == index);
        Some(match known {
            Some(at) => {
                if let Some(own) = context.subjects.get_mut(at) {
                    // The subject is shared: what one of its rules accepts holds for all, and the most reserved
                    // disclosure does.
                    own.floors |= floors;
                    own.disclosure = own.disclosure.max(disclosure);
                }
                at
            }
            None => {
                let prefix = KeyPrefix::new(UNKEYED, None);
                context.subjects.push(SubjectRule {
                    layer: subject_layer(&per, layer),
                    per,
                    ladder: index,
                    ladder_name,
                    floors,
                    disclosure,
                    prefix,
                    counted: 0,
                });
                context.subjects.len().saturating_sub(1)
            }
        })
    }

    fn ladder_fits(
        &mut self,
        file: &RuleFile,
        name: &Text,
        ladder: &Ladder,
        identity: &[Per],
        measure: &Measure,
        source: &Identity,
    ) {
        let span = name.span.clone();
        if identity.is_empty() {
            let help = "a penalty needs a subject: count by user, tenant or ip";
            return self.error("ladder-for-nobody", span, "a ladder needs an identity in per", help);
        }
        if let Some(why) = unverified(identity, source) {
            let help = "anyone could get the owner banned; use a claim, or a header that a trusted proxy sets";
            self.error("unverified-ladder", span.clone(), why, help);
        }
        // A rung that warns lets a request through uncharged. That is one request too many, but could be any number of
        // bytes.
        let counts_requests = match measure {
            Measure::Fixed(measured) if measured.limit.is_concurrency() => false,
            Measure::Fixed(measured) => measured.cost == CostOf::Requests,
            Measure::Tier(_) | Measure::NamedByTier(_) | Measure::Unlimited => file.cost.is_none(),
        };
        if ladder.rungs.iter().any(Rung::allows) && !counts_requests {
            let message = "a rung that allows the request cannot be used with bytes, named costs or concurrency";
            self.error("ladder-warns", span.clone(), message, "use a ladder whose rungs all deny, such as \"strict\"");
        }
        let every_one = file.strike.as_ref().is_some_and(|strike| strike.value == StrikeName::Request);
        if every_one && ladder.rungs.last().is_some_and(Rung::allows) {
            let message = "the last rung repeats and allows every request, so this rule never limits";
            self.warning("never-denies", span.clone(), message, "end the ladder with a rung that denies");
        }
        // Many people may be behind one address (NAT) or tenant, and one of them can get all of them banned.
        let shared = !identity.iter().any(|per| matches!(per, Per::User | Per::Header(_) | Per::Fact(_)));
        if shared {
            let bans = ladder.rungs.iter().any(|rung| rung.ban.is_some());
            if bans && !file.ban_shared.as_ref().is_some_and(|flag| flag.value) {
                let message = "this ladder bans an address or a tenant, which several people may share";
                self.error("shared-ban", span, message, "write ban_shared = true to accept that");
            } else {
                let message = "strikes are counted by an address or a tenant, which several people may share";
                self.warning("shared-ladder", span, message, "count by user if there is one");
            }
        }
    }
}

/// Returns the layer of a subject. A penalty applies to all requests of its subject, so its layer is that of the identity, not
/// that of the rule that was exceeded.
fn subject_layer(per: &[Per], rule: Layer) -> Layer {
    if per.contains(&Per::User) {
        Layer::User
    } else if per.contains(&Per::Tenant) {
        Layer::Tenant
    } else if per.iter().any(|per| matches!(per, Per::Ip | Per::IpPrefix(_))) {
        Layer::Edge
    } else {
        rule
    }
}

/// Returns why penalties on an identity would not be safe: clients can claim it.
fn unverified(identity: &[Per], source: &Identity) -> Option<String> {
    let weak = |name: &str, from: &Option<IdentitySource>| {
        let from = from.as_ref().filter(|from| !from.is_verified())?;
        let kind = match from {
            IdentitySource::Header(header) => format!("header {header}"),
            IdentitySource::Cookie(cookie) => format!("cookie {cookie}"),
            IdentitySource::Host(_) => "host".to_owned(),
            IdentitySource::Path(_) | IdentitySource::Claim(_) => "path".to_owned(),
        };
        Some(format!("the {name} is taken from the {kind}, which clients choose"))
    };
    identity.iter().find_map(|per| match per {
        Per::Header(name) => Some(format!("the header {name} is not verified")),
        Per::User if source.user_scope == UserScope::Tenant => {
            weak("user", &source.user).or_else(|| weak("tenant", &source.tenant))
        }
        Per::User => weak("user", &source.user),
        Per::Tenant => weak("tenant", &source.tenant),
        _ => None,
    })
}

fn parse_per(text: &str) -> Option<Per> {
    let named = |prefix: &str| text.strip_prefix(prefix).filter(|name| !name.is_empty());
    Some(match text {
        "ip" => Per::Ip,
        "tenant" => Per::Tenant,
        "user" => Per::User,
        "tier" => Per::Tier,
        "category" => Per::Category,
        "endpoint" => Per::Endpoint,
        "method" => Per::Method,
        "host" => Per::Host,
        _ => {
            if let Some(prefix) = named("ip/") {
                // Below /8 one budget would hold a large part of the internet.
                Per::IpPrefix(prefix.parse().ok().filter(|prefix| (8..=128).contains(prefix))?)
            } else if let Some(name) = named("header:") {
                Per::Header(is_token(name).then(|| name.to_ascii_lowercase())?.into())
            } else {
                Per::Fact(named("fact:")?.into())
            }
        }
    })
}

/// `401` or `5xx`.
fn status_range(text: &str) -> Option<(u16, u16)> {
    let text = text.trim();
    if let Some(class) = text.strip_suffix("xx") {
        let class: u16 = class.parse().ok().filter(|class| (1..=5).contains(class))?;
        let low = class.saturating_mul(100);
        return Some((low, low.saturating_add(99)));
    }
    let status: u16 = text.parse().ok().filter(|status| (100..=599).contains(status))?;
    Some((status, status))
}
