"""Changing the role of an LLMDataDist that lives on (API §3.6, BEHAVIOUR §7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_datadist.checks import check_rule, check_type
from llm_datadist.errors import LLMException, LLMStatusCode
from llm_datadist.instance.base import EngineOwner
from llm_datadist.log import logger
from llm_datadist.options import LISTEN, SWITCH_ROLE, parse_listen_ip_info
from llm_datadist.types import LLMRole

if TYPE_CHECKING:
    from llm_datadist.options import Options

__all__ = ["Switching"]


class Switching(EngineOwner):
    """switch_role."""

    def switch_role(self, role: LLMRole, switch_options: dict[str, Any] | None = None) -> None:
        """Take another role, and begin, move or cease to listen. Caches, their ids and keys are not touched.

        With ``llm.listenIpInfo`` in the options this end listens there from now on (the same address as before is
        left alone); without it, it listens no more. Other options are ignored, so the dict of a whole LLMConfig will
        do. With ``llm.TransferBackend`` the listener stays as it is.

        In v2 mode the role is a label: the same role is allowed, and ``enable_switch_role`` is not asked for. In v1
        mode ``enable_switch_role`` is needed, the role must be another one, and PROMPT needs ``llm.listenIpInfo``.

        Args:
            role: The role from now on.
            switch_options: A dict of options, or None for none.

        Raises:
            NotInitialized: Before init or after finalize.
            TypeError: Wrong types (``NoneArgument`` for a role that is None).
            ParamError: ``llm.listenIpInfo`` is not of the form ip:port; in v1 mode the same role, or PROMPT without it.
            StateError: There is a link, whoever made it, or a communicator is being prepared (``LLM_EXIST_LINK``).
            LinkError: The new address cannot be bound (``LLM_FAILED``).
            LLMException: With ``LLM_FEATURE_NOT_ENABLED``: v1 mode without ``enable_switch_role``, or with several
                addresses; another address with ``llm.TransferBackend``.

        Whatever is raised, role and listener are as before; only when the new address shares the port of the old one,
        and both the new and the old cannot be bound any more, this end listens no more, and the text says so.

        Source: API §3.6, BEHAVIOUR §7.
        """
        with self._lifecycle:  # first of all: role and engine are those of now
            engine = self._require_engine("switch_role")
            check_type("role", role, LLMRole)
            text = _listen_text(switch_options)
            if not engine.options.cache_manager:
                _check_v1(engine.options, self._role, role, text)
            wanted = None if text is None else parse_listen_ip_info(text)
            if engine.options.transfer_backend is not None:
                _check_backend(engine.options, engine.links.listen_address, wanted)
                wanted = engine.options.listen
            try:
                engine.switch(role, wanted)
            except LLMException as error:
                error.args = (f"switch_role to {role.name}: {error}; the role stays {self._role.name}",)
                raise
            before, self._role = self._role, role
        logger.info("%r: its role was %s", self, before.name)


def _listen_text(switch_options: object) -> str | None:
    if switch_options is None:
        return None
    value = check_type("switch_options", switch_options, dict).get(LISTEN)
    return None if value is None else check_type(f"switch_options[{LISTEN!r}]", value, str)


def _check_v1(options: Options, old: LLMRole, new: LLMRole, listen: str | None) -> None:
    if not options.enable_switch_role:
        raise LLMException(
            f"switch_role: {SWITCH_ROLE} is not '1'; set LLMConfig.enable_switch_role = True before init",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    check_rule(new is not old, f"role: it is {old.name} already")
    if listen is not None and ";" in listen:
        raise LLMException(
            f"{LISTEN}: {listen!r} lists several addresses; one instance serves one device",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    check_rule(new is not LLMRole.PROMPT or listen is not None, f"{LISTEN} is missing: PROMPT needs it")


def _check_backend(options: Options, now: tuple[str, int] | None, wanted: tuple[str, int] | None) -> None:
    if wanted not in (None, options.listen, now):
        raise LLMException(
            f"{LISTEN}: {wanted} instead of {now}: with llm.TransferBackend={options.transfer_backend} the address "
            "cannot change",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
