"""Tracks what is on the device, in host memory and on disk as a program runs, operation by operation."""

from __future__ import annotations

from planner.schedule.chain import Chain
from planner.schedule.compile import Op, OpKind, Program, overwritten, reads
from planner.schedule.items import ACTIVATIONS, GRADIENT, STATES, WEIGHT, Item
from planner.schedule.operations import gradient_slots_of
from planner.schedule.plan import Direction

_GRADIENT = -1  # instead of a weight's version: the gradient has overwritten the weight
_NOTHING = Item(), 0  # an empty slot


class InvalidProgram(ValueError):
    """The program would compute something wrong, or would not fit its memory budget."""


class Contents:
    """Where each item is, and in which version, while a program's operations are applied one by one over some steps.

    `apply` and `end_step` raise InvalidProgram if an operation would read data that is missing or not current.
    """

    def __init__(self, program: Program, chain: Chain) -> None:
        self.program, self.chain = program, chain
        self.trainable = {t.name for t in chain.tensors() if t.trainable}
        self.frame = {t.name for t in chain.frame_tensors if t.trainable}
        known = {t.name for t in chain.tensors()}
        for item in program.resident:
            if item.kind not in (WEIGHT, STATES) or item.name not in known:
                raise InvalidProgram(f"{item} cannot be on the device when a step begins")
        self.version = dict.fromkeys(known | self.frame, 0)
        self.device = dict.fromkeys(program.resident, 0)  # item -> version; for "g:" the contributions added
        self.host = {Item.of(kind, name): 0 for name in known for kind in (WEIGHT, STATES)}
        self.gradient: dict[str, int] = {}  # tensor -> contributions so far
        self.sent: set[str] = set()  # complete gradients on the host
        self.on_disk = {t.name for t in chain.tensors() if t.on_disk}
        self.gradient_slots = gradient_slots_of(chain)  # of tensors wholly on disk
        self.slots: dict[int | None, tuple[Item, int]] = {}  # slot -> the weight read last, and its version
        self.in_gradient_slot: dict[int | None, tuple[Item, int]] = {}  # gradients, or weights in their place
        self.pieces = {t.name: len(chain.state_pieces(t)) for t in chain.tensors() if t.states_on_disk}
        self.written: dict[Item, int] = {}  # piece of states -> its version on disk
        self.in_ring: dict[int | None, tuple[Item, int]] = {}  # piece of states in a slot, and its version
        self.passing: dict[int | None, tuple[str, OpKind]] = {}  # activations in a slot, and what put them there
        self.on_drive: set[str] = set()  # activations that were written and not read yet
        self.can_trail = {t.name for t in chain.tensors() if t.can_trail}
        self.followed_pieces: dict[str, set[int]] = {}  # of tensors whose trailing states are being updated
        self.updated_pieces: dict[str, set[int]] = {}  # of tensors whose update has begun
        self.trailing: set[str] = set()  # tensors whose states are one version behind the weight
        self.tentative: set[str] = set()  # tensors updated before the norm was known, whose CPU_REPLAY has not come yet
        self.updated: dict[str, int] = {}
        self.normed: set[str] = set()
        self.clipped = False
        self.users = chain.users()
        self.overwritten = overwritten(chain, program.ops)

    def complete(self, name: str) -> bool:
        return self.gradient.get(name, 0) == self._of_round(name) * self.program.rounds

    def _of_round(self, name: str) -> int:
        """The number of contributions that a round adds to the gradient of the tensor `name`."""
        return len(self.users[name]) * self.program.slices

    def gone(self, op: Op, item: Item) -> None:
        if item not in self.device:
            raise InvalidProgram(f"{op.name} needs {item}, which is not on the device")

    def apply(self, op: Op) -> None:
        """Apply one operation. Raises InvalidProgram if it would read data that is missing or not current."""
        match op.kind:
            case OpKind.ALLOC:
                if op.subject in self.device:
                    raise InvalidProgram(f"{op.name}: {op.subject} is on the device already")
                self.device[op.item] = -1
            case OpKind.FREE:
                self.gone(op, op.item)
                if op.item.kind == GRADIENT and not self._used(op.item):
                    raise InvalidProgram(f"{op.name} drops a gradient that nothing has used")
                del self.device[op.item]
            case OpKind.READ | OpKind.PEEK if op.piece is not None:
                self.in_ring[op.slot] = op.item, self.written.get(op.item, 0)
            case OpKind.READ | OpKind.WRITE if op.item.kind == ACTIVATIONS:
                self._pass(op)
            case OpKind.READ | OpKind.WRITE if op.passes_whole:
                self._pass_whole(op)
            case OpKind.WRITE:
                piece, version = self.in_ring.get(op.slot, _NOTHING)
                if piece != op.subject or version <= self.written.get(piece, 0):
                    raise InvalidProgram(f"{op.name}: its slot does not hold the updated piece")
                self.written[piece] = version
            case OpKind.READ:
                if op.item.name not in self.on_disk or op.slot is None:
                    raise InvalidProgram(f"{op.name}: {op.subject} is not on disk")
                self.slots[op.slot] = op.item, self.host[op.item]
            case OpKind.FETCH:
                self._fetch(op)
            case OpKind.SEND:
                self._send(op)
            case OpKind.NORM:
                for name in op.names:
                    if name not in self.frame:
                        self.gone(op, Item.gradient(name))
                        if not self.complete(name):
                            raise InvalidProgram(f"{op.name}: the gradient of {name} is not complete")
                    self.normed.add(name)
            case OpKind.CLIP:
                if missing := (self.trainable | self.frame) - self.normed:
                    raise InvalidProgram(f"{op.name}: no norm of {min(missing)}")
                self.clipped = True
            case OpKind.UPDATE | OpKind.CPU_UPDATE | OpKind.CPU_AHEAD:
                for name in op.names:
                    if op.piece is None:
                        self._update(op, name)
                    else:
                        self._update_piece(op, name, op.piece)
            case OpKind.CPU_WEIGHT:
                self._update_piece(op, op.names[0], op.piece, trails=True)
            case OpKind.CPU_STATES:
                self._follow(op, op.names[0], op.piece)
            case OpKind.CPU_REPLAY:
                for name in op.names:
                    self._replay(op, name)
            case OpKind.RUN:
                self._run(op)

    def _used(self, item: Item) -> bool:
        """Whether the gradient is no longer needed on the device: its sum is on the host, or the update is done."""
        on_host = item in self.host and self.host[item] == self.gradient.get(item.name)
        return on_host or (self.complete(item.name) and bool(self.updated.get(item.name)))

    def _fetch(self, op: Op) -> None:
        item = op.item
        self.gone(op, item)
        if item.kind == GRADIENT:
            if op.slot is not None and self.in_gradient_slot.get(op.slot) != (item, self.host.get(item)):
                raise InvalidProgram(f"{op.name}: its slot does not hold {item}")
            if self.host.get(item) != self.gradient.get(item.name, 0):
                raise InvalidProgram(f"{op.name}: the host's copy of {item} is not the sum so far")
            self.device[item] = self.host[item]
            return
        if item.kind == ACTIVATIONS and op.slot is not None:
            if self.passing.pop(op.slot, (None, None))[0] != item:
                raise InvalidProgram(f"{op.name}: its slot does not hold {item}")
            self.device[item] = 0
            return
        if item.kind == ACTIVATIONS:
            if item not in self.host:
                raise InvalidProgram(f"{op.name}: {item} was not sent to the host")
            self.device[item] = self.host.pop(item)
            return
        if item.name in self.on_disk and (op.slot is None or self.slots.get(op.slot) != (item, self.host[item])):
            raise InvalidProgram(f"{op.name}: {item} was not read from disk, or something else was after it")
        if item.name in self.updated_pieces:
            raise InvalidProgram(f"{op.name}: the update of {item} is not over")
        if item.name in self.tentative:
            raise InvalidProgram(f"{op.name}: {item} is not final before the norm is known")
        if self.host.get(item) != self.version[item.name]:
            raise InvalidProgram(f"{op.name}: the host's copy of {item} is not current")
        self.device[item] = self.host[item]

    def _send(self, op: Op) -> None:
        item = op.item
        self.gone(op, item)
        if item.kind == ACTIVATIONS and op.slot is not None:
            self.passing[op.slot] = item, op.kind
            return
        if item.name in self.gradient_slots and (item.kind != GRADIENT or op.slot is None):
            raise InvalidProgram(f"{op.name}: nothing takes {item} to its disk")
        if item.kind == GRADIENT:
            if self.gradient[item.name] % self._of_round(item.name):
                raise InvalidProgram(f"{op.name}: the gradient is not complete")
            if item.name in self.trailing:
                raise InvalidProgram(f"{op.name}: states of {item.name} still need the gradient of the step before")
            self.sent.discard(item)  # the gradient of the step before, if no update has used it
            if self.complete(item.name):
                self.sent.add(item)
            if item.name in self.overwritten:
                self.host[Item.weight(item.name)] = _GRADIENT
            if op.slot is not None:
                self.in_gradient_slot[op.slot] = item, self.device[item]
                self.host.pop(item, None)  # its copy on the host is current again when the write is done
                return
        self.host[item] = self.device[item]

    def _pass_whole(self, op: Op) -> None:
        """For a tensor entirely on disk: read or write its gradient, or write the weight that has taken the gradient's
        place in the slot. What is on the drive counts as the host's copy."""
        item = op.item
        if op.kind is OpKind.READ:
            if item not in self.host:
                raise InvalidProgram(f"{op.name}: {item} is not on disk")
            self.in_gradient_slot[op.slot] = item, self.host[item]
            return
        held, version = self.in_gradient_slot.get(op.slot, _NOTHING)
        if held != item or (item.kind == WEIGHT and version != self.version[item.name]):
            raise InvalidProgram(f"{op.name}: its slot does not hold {item} as it is now")
        self.host[item] = version

    def _pass(self, op: Op) -> None:
        """Write activations to a drive, or read them back. What is written once is read once."""
        item = op.item
        if op.kind is OpKind.WRITE:
            if self.passing.get(op.slot) != (item, OpKind.SEND):
                raise InvalidProgram(f"{op.name}: its slot does not hold {item} as it was sent")
            self.on_drive.add(item)
            return
        if item not in self.on_drive:
            raise InvalidProgram(f"{op.name}: {item} is not on disk")
        self.on_drive.discard(item)
        self.passing[op.slot] = item, op.kind

    def _update(self, op: Op, name: str) -> None:
        if op.kind is OpKind.CPU_AHEAD:
            if self.clipped or not self.program.clip:
                raise InvalidProgram(f"{op.name} has no norm to run ahead of")
            self.tentative.add(name)
        elif self.program.clip and not self.clipped:
            raise InvalidProgram(f"{op.name} updates {name} before the norm of all gradients is known")
        self.updated[name] = self.updated.get(name, 0) + 1
        if name in self.frame:
            return
        if op.kind is OpKind.UPDATE:
            if not self.complete(name):
                raise InvalidProgram(f"{op.name}: the gradient of {name} is not complete")
            self.gone(op, Item.gradient(name))
            for item in (Item.weight(name), Item.states(name)):
                self.gone(op, item)
                if self.device[item] != self.version[name]:
                    raise InvalidProgram(f"{op.name}: the device's copy of {item} is not current")
            self.version[name] += 1
            self.device[Item.weight(name)] = self.device[Item.states(name)] = self.version[name]
        else:
            if name in self.pieces:
                raise InvalidProgram(f"{op.name}: the states of {name} are on disk")
            self._ready_on_host(op, name, WEIGHT, STATES)
            self.version[name] += 1
            self.host[Item.weight(name)] = self.host[Item.states(name)] = self.version[name]
            if op.kind is not OpKind.CPU_AHEAD:  # which may be done again, and then reads the gradient once more
                self.sent.discard(Item.gradient(name))

    def _ready_on_host(self, op: Op, name: str, *kinds: str) -> None:
        """Check that the tensor's gradient and its items of these kinds are on the host, current, and that these items
        are not on the device."""
        if Item.gradient(name) not in self.sent:
            raise InvalidProgram(f"{op.name}: the gradient of {name} is not on the host")
        slot, gradient = self.gradient_slots.get(name), Item.gradient(name)
        if slot is not None and self.in_gradient_slot.get(slot) != (gradient, self.host.get(gradient, -1)):
            raise InvalidProgram(f"{op.name}: its gradient was not read from disk")
        for kind in kinds:
            item = Item.of(kind, name)
            if self.host[item] != (_GRADIENT if kind == WEIGHT and name in self.overwritten else self.version[name]):
                raise InvalidProgram(f"{op.name}: the host's copy of {item} is not current")
            if item in self.device:
                raise InvalidProgram(f"{op.name}: {item} is on the device, and would be stale there")

    def _update_piece(self, op: Op, name: str, piece: int | None, *, trails: bool = False) -> None:
        """Update one piece of a tensor's states; the tensor is updated when all its pieces are. `trails`: only the
        weight is updated now, the states in the next step."""
        if piece is None or op.kind not in (OpKind.CPU_UPDATE, OpKind.CPU_WEIGHT):
            raise InvalidProgram(f"{op.name}: states on disk are updated once, when the norm is known")
        if trails and not (self.program.clip and name in self.can_trail):
            raise InvalidProgram(f"{op.name}: nothing lets the states of {name} trail")
        if name in self.trailing:
            raise InvalidProgram(f"{op.name}: the states of {name} are a step behind")
        if self.program.clip and not self.clipped:
            raise InvalidProgram(f"{op.name} updates {name} before the norm of all gradients is known")
        self._ready_on_host(op, name, WEIGHT)
        if self.in_ring.get(op.slot) != (Item.states(name, piece), self.version[name]):
            raise InvalidProgram(f"{op.name}: its slot does not hold the piece as it is now")
        done = self.updated_pieces.setdefault(name, set())
        if piece in done or piece >= self.pieces.get(name, 0):
            raise InvalidProgram(f"{op.name}: {name} has no such piece to update")
        done.add(piece)
        self.in_ring[op.slot] = _NOTHING if trails else (Item.states(name, piece), self.version[name] + 1)
        if len(done) == self.pieces[name]:
            del self.updated_pieces[name]
            self.updated[name] = self.updated.get(name, 0) + 1
            self.version[name] += 1
            self.host[Item.states(name)] = self.version[name]
            if name in self.gradient_slots:
                self.in_gradient_slot[self.gradient_slots[name]] = Item.weight(name), self.version[name]
            else:
                self.host[Item.weight(name)] = self.version[name]
            if trails:
                self.trailing.add(name)
            else:
                self.sent.discard(Item.gradient(name))

    def _follow(self, op: Op, name: str, piece: int | None) -> None:
        """Update one piece of states whose weight was updated in the step before. When all pieces are updated, the
        gradient is no longer needed."""
        if name not in self.trailing or Item.gradient(name) not in self.sent:
            raise InvalidProgram(f"{op.name}: the states of {name} are not behind, or its gradient is not on the host")
        if self.in_ring.get(op.slot) != (Item.states(name, piece), self.version[name] - 1):
            raise InvalidProgram(f"{op.name}: its slot does not hold the piece as it is now")
        done = self.followed_pieces.setdefault(name, set())
        if piece is None or piece in done or piece >= self.pieces.get(name, 0):
            raise InvalidProgram(f"{op.name}: {name} has no such piece to update")
        done.add(piece)
        self.in_ring[op.slot] = Item.states(name, piece), self.version[name]
        if len(done) == self.pieces[name]:
            del self.followed_pieces[name]
            self.trailing.discard(name)
            self.sent.discard(Item.gradient(name))

    def _replay(self, op: Op, name: str) -> None:
        if not self.clipped:
            raise InvalidProgram(f"{op.name} before the norm of all gradients is known")
        if name not in self.tentative:
            raise InvalidProgram(f"{op.name}: {name} was not updated ahead")
        if Item.gradient(name) not in self.sent:
            raise InvalidProgram(f"{op.name}: the gradient of {name} is not on the host")
        self.tentative.discard(name)
        self.sent.discard(Item.gradient(name))

    def _run(self, op: Op) -> None:
        direction, index, k = op.turn
        for name in reads(self.chain, self.program.options, direction, index):
            self.gone(op, Item.weight(name))
            if self.device[Item.weight(name)] != self.version[name]:
                raise InvalidProgram(f"{op.name}: the device's copy of {name} is not current")
            if direction is not Direction.BACKWARD and Item.gradient(name) in self.sent and name not in self.trailing:
                raise InvalidProgram(f"{op.name}: the update of {name} that the step before left is not done")
        if not self.program.trains:
            return
        block = self.chain.blocks[index]
        activations = Item.activations(index, k) if block.option(self.program.options[index]).offloaded_bytes else None
        if direction is Direction.FORWARD:
            if activations:
                self.device[activations] = 0
            return
        if activations and direction is Direction.BACKWARD and self.device.pop(activations, -1) < 0:
            raise InvalidProgram(f"{op.name}: {activations} is not back on the device")
        for tensor in block.tensors:
            if tensor.trainable:
                before = self.gradient.get(tensor.name, 0)
                if before != self.device.get(Item.gradient(tensor.name), 0):
                    raise InvalidProgram(f"{op.name}: the sum of {tensor.name}'s gradients so far is not on the device")
                self.gradient[tensor.name] = self.device[Item.gradient(tensor.name)] = before + 1

    def end_step(self) -> None:
        """Check that a step is complete, and prepare for the next one. Raises InvalidProgram."""
        if set(self.device) != set(self.program.resident):
            odd = min(set(self.device) ^ set(self.program.resident))
            raise InvalidProgram(f"the cycle does not close: {odd} is on the device at one end of the step only")
        if self.tentative:
            raise InvalidProgram(f"{min(self.tentative)} is updated ahead of the norm and never replayed")
        # Gradients of tensors wholly on disk stay: an update may read them in the next step.
        for name in self.gradient.keys() - self.gradient_slots.keys():
            self.host.pop(Item.gradient(name), None)
        self.gradient.clear()
        self.normed.clear()
        self.clipped = False
