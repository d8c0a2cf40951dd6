"""The prompt of a call: the shared part first, so that the prefix cache holds it, then the request."""

from __future__ import annotations

from photon_grpc.core.ask import ChatInput, ChatMessage, TextInput
from photon_grpc.errors import InvalidRequest, InvalidTemplate
from photon_grpc.frontend.input.chat import ChatTemplate


class PromptForm:
    """The form that a model's chat template allows. The texts are data: spelled markers in them stay text."""

    def __init__(self, template: ChatTemplate | None) -> None:
        """Find out whether `template` takes a system message; None: the model has no template."""
        self._template = template
        self._has_system = template is not None and _takes_system(template)

    def input(self, shared: str, request: str) -> ChatInput | TextInput:
        """Return the input of a call."""
        if self._template is None:
            return TextInput(f"{shared}\n\nRequest: {request}\nAnswer: ")
        if not self._has_system:
            return ChatInput((ChatMessage("user", f"{shared}\n\n{request}"),))
        return ChatInput((ChatMessage("system", shared), ChatMessage("user", request)))

    def text(self, shared: str, request: str) -> str:
        """Return the prompt as text, for people. Raise InvalidTemplate."""
        made = self.input(shared, request)
        if isinstance(made, TextInput) or self._template is None:
            return str(getattr(made, "text", ""))
        return self._template.render(self._template.variables(made))


def _takes_system(template: ChatTemplate) -> bool:
    chat = ChatInput((ChatMessage("system", "photon"), ChatMessage("user", "x")))
    try:
        return "photon" in template.render(template.variables(chat))
    except (InvalidTemplate, InvalidRequest):
        return False
