"""The prompt of a call: the shared part first, so that the prefix cache holds it, then the request."""

from __future__ import annotations

from photon_grpc.core.ask import ChatInput, ChatMessage, TextInput
from photon_grpc.errors import InvalidRequest, InvalidTemplate
from photon_grpc.frontend.input.chat import ChatTemplate
from photon_grpc.server.services.service_set import ServedMethod


class PromptForm:
    """The form that a model's chat template allows. The texts are data: spelled markers in them stay text."""

    def __init__(self, template: ChatTemplate | None) -> None:
        """Find out whether `template` takes a system message; None: the model has no template."""
        self._template = template
        self._has_system = template is not None and _takes_system(template)

    def input(self, method: ServedMethod, request: str) -> ChatInput | TextInput:
        """Return the input of a call with the request's JSON. Raise InvalidTemplate for the method's template."""
        shared, options = method.shared_prompt, method.options
        turns = [*options.examples, (request, "")]
        texts = [(options.user_turn(asked), answer) for asked, answer in turns]
        if self._template is None:
            shown = [f"Request: {asked}\nAnswer: {answer}" for asked, answer in texts]
            return TextInput("\n\n".join([shared, *shown]))
        if not self._has_system:
            (first, answer), *rest = texts
            texts = [(f"{shared}\n\n{first}", answer), *rest]
        messages = [ChatMessage("system", shared)] if self._has_system else []
        for asked, answer in texts:
            messages += [ChatMessage("user", asked), ChatMessage("assistant", answer)]
        return ChatInput(tuple(messages[:-1]))

    def text(self, method: ServedMethod, request: str) -> str:
        """Return the prompt as text, for people. Raise InvalidTemplate."""
        made = self.input(method, request)
        if isinstance(made, TextInput) or self._template is None:
            return str(getattr(made, "text", ""))
        return self._template.render(self._template.variables(made))


def _takes_system(template: ChatTemplate) -> bool:
    chat = ChatInput((ChatMessage("system", "photon"), ChatMessage("user", "x")))
    try:
        return "photon" in template.render(template.variables(chat))
    except (InvalidTemplate, InvalidRequest):
        return False
