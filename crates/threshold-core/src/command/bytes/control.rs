//! Bans and settings inside commands and answers.

use super::{Field, MAX_ITEMS};
use crate::codec::{BytesError, Reader, Writer};
use crate::control::{ControlChange, ControlPage};

impl Field for Box<ControlChange> {
    fn write(&self, out: &mut Writer) {
        ControlChange::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        ControlChange::read(from).map(Self::new)
    }
}

impl Field for Box<[ControlChange]> {
    fn write(&self, out: &mut Writer) {
        out.number(self.len() as u64);
        self.iter().for_each(|change| change.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let count = from.count(MAX_ITEMS)?;
        (0..count).map(|_| ControlChange::read(from)).collect()
    }
}

impl Field for Box<ControlPage> {
    fn write(&self, out: &mut Writer) {
        ControlPage::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        ControlPage::read(from).map(Self::new)
    }
}

#[cfg(test)]
mod tests {
    use crate::codec::Format;
    use crate::command::{Answer, Command};
    use crate::control::{ControlChange, ControlLog};
    use crate::{Digest, Timestamp};

    #[test]
    fn control_commands_and_their_answers_read_back() {
        let change = ControlChange::Ban { id: Digest::from_u128(7), ban: None };
        let mut log = ControlLog::default();
        log.add(change.clone(), Timestamp::EPOCH).unwrap();
        let many = [change.clone(), ControlChange::Ban { id: Digest::from_u128(8), ban: None }];
        let commands = [
            Command::Control(Box::new(change)),
            Command::ControlAll { changes: Box::new(many), after: None },
            Command::ControlAll { changes: Box::new([]), after: Some(300) },
            Command::ReadControl { after: u64::MAX, most: u32::MAX },
        ];
        for command in commands {
            assert_eq!(Command::from_bytes(&command.to_bytes(Format::PRESENT)), Ok(command));
        }
        let page = Answer::Control(Box::new(log.after(0, 9)));
        for answer in [Answer::Controlled { number: 300 }, Answer::Outdated, page] {
            assert_eq!(Answer::from_bytes(&answer.to_bytes(Format::PRESENT)), Ok(answer));
        }
    }
}
