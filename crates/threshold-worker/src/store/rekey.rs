//! Moving records from the keys of an old secret to those of the current one. Where the name of an object has a digest, it is another
//! object under the new secret.

use std::sync::Arc;

use threshold_core::command::KeyMoves;
use threshold_core::key::Partition;
use threshold_core::{Answer, Command, Digest};
use threshold_limiter::store::StoreError;
use threshold_limiter::store::partitioned::Partitions as _;

use super::{Call, IN_KV, ObjectStore, Place};
use crate::object::moving::{DELETE, READ, Record, WRITE, from_bytes, to_bytes};
use crate::object::records::Kind;

/// The records that move from one object to another.
struct Way {
    from: Partition,
    to: Partition,
    /// The kind, the old key and the new one.
    records: Vec<(Kind, Digest, Digest)>,
}

impl ObjectStore {
    /// Moves each record to its new key, unless there is a record under the new key already: that one is more recent.
    pub(super) async fn rekey(&self, moves: KeyMoves) -> Result<Answer, StoreError> {
        // A key of a limit without a policy moves too.
        let call = Call { has_own_names: true, ..self.call() };
        let mut ways: Vec<Way> = Vec::new();
        let balances = moves.balances.iter().map(|(old, new, _)| (Kind::Balance, *old, *new));
        let standings = moves.standings.iter().map(|(old, new)| (Kind::Standing, *old, *new));
        let accounts = moves.accounts.iter().map(|(old, new)| (Kind::Account, *old, *new));
        for record @ (_, old, new) in balances.chain(standings).chain(accounts) {
            let (from, to) = (call.partition(old), call.partition(new));
            // A key of KV with a digest is another one under the new secret, and its budget begins at zero. Others do not change.
            if from == IN_KV || to == IN_KV {
                continue;
            }
            match ways.iter_mut().find(|way| (way.from, way.to) == (from, to)) {
                Some(way) => way.records.push(record),
                None => ways.push(Way { from, to, records: vec![record] }),
            }
        }
        for way in ways {
            if way.from == way.to {
                self.rename(&call, &way, &moves).await?;
            } else {
                self.carry(&call, &way).await?;
            }
        }
        Ok(Answer::Done)
    }

    /// Renames records within their object.
    async fn rename(&self, call: &Call<'_>, way: &Way, moves: &KeyMoves) -> Result<(), StoreError> {
        let own = |kind, old| way.records.iter().any(|record| (record.0, record.1) == (kind, old));
        let part = KeyMoves {
            balances: moves.balances.iter().filter(|(old, ..)| own(Kind::Balance, *old)).copied().collect(),
            standings: moves.standings.iter().filter(|(old, _)| own(Kind::Standing, *old)).copied().collect(),
            accounts: moves.accounts.iter().filter(|(old, _)| own(Kind::Account, *old)).copied().collect(),
        };
        let object = call.object(way.to).ok_or(StoreError::Unavailable)?;
        self.send(object, Command::Rekey(part)).await.map(drop)
    }

    /// Carries records from one object to another.
    async fn carry(&self, call: &Call<'_>, way: &Way) -> Result<(), StoreError> {
        let object = |partition| call.object(partition).ok_or(StoreError::Unavailable);
        let (from, to) = (object(way.from)?, object(way.to)?);
        let asked: Vec<Record> = way.records.iter().map(|(kind, old, _)| Record::asked(*kind, *old)).collect();
        let found = self.move_records(&from, READ, &asked).await?;
        if found.is_empty() {
            return Ok(());
        }
        let new = |record: &Record| {
            let own = |(kind, old, _): &&(Kind, Digest, Digest)| (*kind, old.to_u128()) == (record.kind, record.id);
            way.records.iter().find(own).map(|(_, _, new)| Record { id: new.to_u128(), ..record.clone() })
        };
        let copies: Vec<Record> = found.iter().filter_map(new).collect();
        self.move_records(&to, WRITE, &copies).await?;
        self.move_records(&from, DELETE, &asked).await?;
        Ok(())
    }

    async fn move_records(
        &self,
        object: &Arc<Place>,
        path: &str,
        records: &[Record],
    ) -> Result<Vec<Record>, StoreError> {
        let bytes = self.exchange(object, path, &to_bytes(records)).await?;
        from_bytes(&bytes).ok_or(StoreError::Unavailable)
    }
}
