//! Request ids inside commands and answers.

use super::{Field, put, take};
use crate::codec::{BytesError, Reader, Writer};
use crate::command::{RequestKey, RequestState};

impl Field for RequestKey {
    fn write(&self, out: &mut Writer) {
        let Self { id, request, by } = self;
        let fields: [&dyn Field; 3] = [id, request, by];
        fields.into_iter().for_each(|field| field.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self { id: take(from)?, request: take(from)?, by: take(from)? })
    }
}

impl Field for RequestState {
    fn write(&self, out: &mut Writer) {
        match self {
            Self::Begun => put(out, 0, &[]),
            Self::UnderWay => put(out, 1, &[]),
            Self::Answered(answer) => put(out, 2, &[answer]),
            Self::Reused => put(out, 3, &[]),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        match from.byte()? {
            0 => Ok(Self::Begun),
            1 => Ok(Self::UnderWay),
            2 => Ok(Self::Answered(take(from)?)),
            3 => Ok(Self::Reused),
            _ => Err(BytesError::Malformed("request")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Format;
    use crate::command::{Answer, Command};
    use crate::key::{Digest, TraceId};
    use crate::time::Span;

    #[test]
    fn the_commands_of_request_ids_read_back() {
        let (id, request) = (Digest::from_u128(7), Digest::from_u128(u128::MAX));
        let key = RequestKey { id, request, by: TraceId::from_u128(9) };
        for repeats in [None, Some(0), Some(u32::MAX)] {
            let command = Command::BeginRequest { key, life: Span::from_secs(10), repeats };
            assert_eq!(Command::from_bytes(&command.to_bytes(Format::PRESENT)), Ok(command));
        }
        for answer in [None, Some(Box::default()), Some([0, 255].into())] {
            let command = Command::EndRequest { key, answer, life: Span::MINUTE };
            assert_eq!(Command::from_bytes(&command.to_bytes(Format::PRESENT)), Ok(command));
        }
        let states = [RequestState::Begun, RequestState::UnderWay, RequestState::Reused];
        for state in states.into_iter().chain([RequestState::Answered([1, 2, 3].into())]) {
            let answer = Answer::Request(state);
            assert_eq!(Answer::from_bytes(&answer.to_bytes(Format::PRESENT)), Ok(answer));
        }
    }
}
