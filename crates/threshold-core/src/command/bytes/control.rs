//! Bans and settings inside commands and answers.

use super::Field;
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
        for command in [Command::Control(Box::new(change)), Command::ReadControl { after: u64::MAX, most: u32::MAX }] {
            assert_eq!(Command::from_bytes(&command.to_bytes(Format::PRESENT)), Ok(command));
        }
        for answer in [Answer::Controlled { number: 300 }, Answer::Control(Box::new(log.after(0, 9)))] {
            assert_eq!(Answer::from_bytes(&answer.to_bytes(Format::PRESENT)), Ok(answer));
        }
    }
}
